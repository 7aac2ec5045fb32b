"""The usage that answers show, and the type of their JSON."""

from dataclasses import dataclass
from typing import Any

from dcpmla.serving.messages import Output

Json = dict[str, Any]


@dataclass
class Usage:
    """Tokens of an HTTP request: prompts once each, new tokens of all choices.

    Attributes:
        cached_tokens: Tokens of prompts that earlier requests had computed.
        reasoning_tokens: New tokens that are reasoning, None where answers are not parsed.
        has_begun: Whether an output has been counted.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
    has_begun: bool = False

    def count(self, output: Output) -> bool:
        """Count the tokens of a choice's output, and return whether it is the first."""
        is_first, self.has_begun = not self.has_begun, True
        if is_first:
            self.cached_tokens = output.num_cached_tokens
        self.completion_tokens += output.num_tokens
        return is_first

    def body(self) -> Json:
        """Return OpenAI's object."""
        body: Json = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            body["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return body
