"""The parts of an answer that a client asks for, and its usage."""

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass
class Usage:
    """Tokens of an HTTP request: prompts once each, new tokens of all choices.

    Attributes:
        cached_tokens: Tokens of prompts that earlier requests had computed.
        reasoning_tokens: New tokens that are reasoning, None where answers are not parsed.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None

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
        special_tokens: Whether the text has special tokens.
        usage_at_end: Whether a stream ends with a chunk of usage.
        usage_in_chunks: Whether each chunk has the usage of its choice so far.
    """

    echo: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    drops_new: bool = False
    token_ids: bool = False
    special_tokens: bool = False
    usage_at_end: bool = False
    usage_in_chunks: bool = False
