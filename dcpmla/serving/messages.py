"""Messages between the HTTP process and the ranks, and how they travel: pickled, each after its length.

Both ends are processes of one job, joined by a socket pair: nothing that a client sends is unpickled.
"""

import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dcpmla.runtime.request import TokenLogprobs
from dcpmla.runtime.sampling import SamplingParams

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Started:
    """The ranks are ready: what the HTTP process must know of the model.

    Attributes:
        tokenizer: transformers'; None where it does not load, then no_tokenizer says why.
        max_model_len: longest sequence, prompt and new tokens, that the model takes and the cache holds.
        max_num_seqs: most requests that run at the same time.
    """

    tokenizer: Any
    no_tokenizer: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int


@dataclass(frozen=True)
class Submit:
    """A request for the engine."""

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Abort:
    """A request that nobody waits for any more."""

    request_id: int


@dataclass(frozen=True)
class Close:
    """No request comes any more."""


@dataclass(frozen=True)
class Drain:
    """The job was told to stop: the HTTP process takes no more requests, and answers with `Close`."""


class Output(NamedTuple):
    """The new tokens of a request in one step.

    Attributes:
        text: that became certain; maybe empty.
        token_ids: New tokens.
        logprobs: of each new token, where they are asked for.
        finish_reason: with the last one.
        num_cached_tokens: of the prompt, that an earlier request had computed.
        prompt_logprobs: with the first one, where they are asked for.
        error: why the engine does not take it; then nothing else counts.
    """

    request_id: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str = ""

    @property
    def num_tokens(self) -> int:
        """Return the number of new tokens."""
        return len(self.token_ids)


@dataclass(frozen=True)
class Report:
    """A step's outputs, and the engine's state after it; one comes about every second from an idle engine.

    Attributes:
        cache_use: part of the cache's blocks that running requests hold, in [0, 1].
        totals: since the engine's start, by the names of metrics.
    """

    outputs: list[Output]
    num_running: int
    num_waiting: int
    cache_use: float
    totals: dict[str, int]


@dataclass(frozen=True)
class Stopped:
    """The last message of the ranks, unless they fail."""


Command = Submit | Abort | Close


def pack(message: object) -> bytes:
    """Return a message as it travels."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


def unpack(packed: bytes) -> Iterator[Any]:
    """Yield the messages that were packed one after the other."""
    start = 0
    while start < len(packed):
        (length,) = LENGTH.unpack_from(packed, start)
        start += LENGTH.size
        yield pickle.loads(memoryview(packed)[start : start + length])
        start += length
