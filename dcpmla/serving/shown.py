"""The parts of an answer that a client asks for, and its usage."""

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


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The parts of an answer that a client asks for.

    Attributes:
        echo: Whether each choice begins with its prompt.
        num_logprobs: Alternatives of each token, None without log probabilities.
        num_prompt_logprobs: Alternatives of each token of the prompt, None without `prompt_logprobs`.
        drops_new: Whether the answer is the prompt alone (an echo of no new tokens).
        token_ids: Whether token ids of prompts and answers are shown.
        usage_at_end: Whether a stream ends with a chunk of usage.
        usage_in_chunks: Whether each chunk has the usage of its choice so far.
    """

    echo: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    drops_new: bool = False
    token_ids: bool = False
    usage_at_end: bool = False
    usage_in_chunks: bool = False
