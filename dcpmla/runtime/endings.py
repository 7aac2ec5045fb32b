"""Ends of requests that the model does not choose: a stop string, found in the engine's own process, or an error."""

from weakref import WeakKeyDictionary

import torch

from dcpmla.runtime.grammars import Grammars
from dcpmla.runtime.masks import NO_TOKEN
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import NOT_FINITE
from dcpmla.text.stream import TextStream
from dcpmla.text.token_bytes import Tokenizer


class StopStrings:
    """The texts of requests that have stop strings, on every rank alike. Other requests have no text here."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: WeakKeyDictionary[Request, TextStream] = WeakKeyDictionary()

    def is_complete(self, request: Request) -> bool:
        """Read a request's tokens since the last call, and return whether they complete a stop string."""
        stream = self._streams.get(request)
        if stream is None:
            stream = TextStream(self._tokenizer, request.params, request.prompt_token_ids)
            self._streams[request] = stream
        stream.push(request.token_ids[stream.num_tokens :])
        return stream.is_stopped


def failure(token_id: int, request: Request, grammars: Grammars, dtype: torch.dtype) -> Exception:
    """Return the error of a request that gets no token.

    Args:
        token_id: NOT_FINITE or NO_TOKEN, instead of the token.
        dtype: Type of the model's numbers.
    """
    if token_id == NO_TOKEN:
        return grammars.failure(request)
    assert token_id == NOT_FINITE
    return FloatingPointError(
        f"logits are NaN or infinite after {len(request.token_ids)} new tokens; the model's numbers exceed the range "
        f"of {str(dtype).removeprefix('torch.')} (try another --dtype), or its weights are damaged"
    )
