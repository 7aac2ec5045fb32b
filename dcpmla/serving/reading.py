"""The text of a request's tokens, made once, where they leave the ranks (`RequestText`)."""

from collections.abc import Sequence

from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.messages import Output
from dcpmla.text.stream import TextStream
from dcpmla.text.token_bytes import Tokenizer

# The ranks get news of a request after this many tokens without a stop string; it waits at MAX_UNSEEN_TOKENS.
_NEWS_TOKENS = 16


class RequestText:
    """The text of one request, up to a stop string.

    Args:
        params: Parameters of the request.
        prompt_token_ids: Tokens of its prompt; the last few matter.
    Attributes:
        stream: Text so far, and the number of its tokens.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self.stream = TextStream(tokenizer, params, prompt_token_ids)
        self._has_stop, self._num_told = bool(params.stop), 0

    def read(self, output: Output) -> Output:
        """Return an output of the ranks with its text and its tokens' offsets, cut and ended at a stop string."""
        stream, offsets, num_before = self.stream, list[int](), self.stream.num_tokens
        if output.finish_reason:
            text = stream.end(output.token_ids, output.finish_reason == "stop", offsets)
        else:
            text = stream.push(output.token_ids, offsets)
        if not stream.is_stopped:
            return output._replace(text=text, offsets=tuple(offsets))
        kept = slice(stream.num_tokens - num_before)
        return output._replace(
            text=text,
            offsets=tuple(offsets),
            token_ids=output.token_ids[kept],
            logprobs=output.logprobs[kept],
            finish_reason="stop",
            stop_string=stream.stop_string,
        )

    def news(self) -> int:
        """Return the number of tokens without a stop string if the ranks need it now, else 0."""
        if not self._has_stop or self.stream.num_tokens - self._num_told < _NEWS_TOKENS:
            return 0
        self._num_told = self.stream.num_tokens
        return self.stream.num_tokens
