"""Stop strings of requests, found in the engine's own process."""

from weakref import WeakKeyDictionary

from dcpmla.runtime.request import Request
from dcpmla.text.stream import TextStream
from dcpmla.text.token_bytes import Tokenizer


class StopStrings:
    """The texts of requests that have stop strings, on every rank alike. Other requests have no text here."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: WeakKeyDictionary[Request, TextStream] = WeakKeyDictionary()

    def is_complete(self, request: Request) -> bool:
        """Read a request's tokens since the last call, and return whether a stop string ends with the last of them."""
        stream = self._streams.get(request)
        if stream is None:
            stream = TextStream.of(self._tokenizer, request.params, request.prompt_token_ids)
            self._streams[request] = stream
        stream.push(request.token_ids[stream.num_tokens :])
        return stream.is_stopped
