"""Messages between the HTTP process and the ranks, typed structs that travel as msgpack, each after its length.

Clients may attack the HTTP process, and even if they took it over, no rank would run their code: a command is numbers
and texts, and is refused unless they have the types of its fields. All ranks read the same bytes, so they refuse alike.
"""

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dcpmla.runtime.request import TokenLogprobs
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.transfer.layout import CacheLayout

LENGTH = struct.Struct("<Q")
BEAT = LENGTH.pack(0)  # A message without content: the HTTP process runs.


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A message with the name of its class."""


class Connect(Message, frozen=True):
    """Another job, to exchange blocks with.

    Attributes:
        engine: Its name; a job that starts again has another one.
        layout: Its cache's layout.
        agents: Metadata of the transports of all its ranks; in base64 where the message is JSON.
    """

    engine: str
    layout: CacheLayout
    agents: Sequence[bytes]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Connect":
        """Return the message of a JSON object.

        Raises:
            ValueError: The object is no job, or has other fields.
        """
        found = msgspec.convert(content, cls)
        if unknown := content["layout"].keys() - vars(found.layout).keys():
            raise ValueError(f"layout has the unknown fields {sorted(unknown)}")
        return found

    def json_fields(self) -> dict[str, Any]:
        """Return the fields of its JSON object."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        del fields["type"]
        return fields


class Disconnect(Message, frozen=True):
    """The end of a job that exchanged blocks with this one."""

    engine: str


class Wanted(Message, frozen=True):
    """A request that waits for another job's prefill.

    Attributes:
        prompt: Its prompt (`pack_tokens`).
        params: Parameters of the request, with its seed.
    """

    request_id: int
    prompt: bytes
    params: SamplingParams
    cache_salt: str


class Pull(Message, frozen=True):
    """The job that prefills a request that was wanted, and the handoff's name there."""

    request_id: int
    engine: str
    handoff: str


class First(Message, frozen=True):
    """The first token of a request, which another job has sampled, with its log probability if they are asked for."""

    request_id: int
    token: TokenLogprobs


class Lose(Message, frozen=True):
    """A request that the chosen job does not prefill; this job does, or it is wanted again."""

    request_id: int
    is_local: bool


class Move(NamedTuple):
    """A prompt's part in a transfer between two jobs; by default none.

    Attributes:
        handoff: Name under which another job reads the blocks of the only choice; empty for none. The choice has the
            params' own seed.
        source: Name of the job that has prefilled it, and its handoff there; None for none.
        first: First token of the only choice, from that job.
        reader: Name of the job that alone may read a handoff; empty for the first one that asks.
    """

    handoff: str = ""
    source: tuple[str, str] | None = None
    first: TokenLogprobs | None = None
    reader: str = ""


STAYS = Move()


class Opened(Message, frozen=True):
    """The local directory of the model, before its weights are read: its tokenizer loads meanwhile."""

    directory: str


class Started(Message, frozen=True):
    """The model, once the ranks are ready.

    Attributes:
        directory: Its local directory.
        max_model_len: Longest sequence, prompt and new tokens, that the model takes and the cache holds.
        max_num_seqs: Limit of requests that run at the same time.
        num_cache_tokens: Tokens that the whole cache holds.
        model_type: Name of the model's family in its config.
        text_type: Name of the family of its text model, which may be another.
        encoder: Text of the checkpoint's own encoder of chats, empty without one.
        eos_token_ids: End-of-sequence tokens.
        no_grammars: Reason why no request may have a grammar; empty if requests may.
        link: This job, for others that exchange blocks with it; None if it exchanges none.
        block_tokens: Tokens of a block of the cache, over all DCP ranks.
    """

    directory: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_cache_tokens: int
    model_type: str = ""
    text_type: str = ""
    encoder: str = ""
    eos_token_ids: list[int] = []
    no_grammars: str = ""
    link: Connect | None = None
    block_tokens: int = 1


class Submit(Message, frozen=True):
    """A prompt for the engine, and a request for each choice.

    Attributes:
        request_ids: Id of each choice.
        seeds: Seed of each choice, in place of the params'.
        prompt: Token ids (`pack_tokens`).
        cache_salt: Salt of the keys of its blocks, "" for none.
        move: Its part in a transfer between two jobs.
    """

    request_ids: list[int]
    seeds: list[int]
    prompt: bytes
    params: SamplingParams
    cache_salt: str = ""
    move: Move = STAYS


class Abort(Message, frozen=True):
    """Requests whose client is gone."""

    request_ids: list[int]


class Stop(Message, frozen=True):
    """A request that a stop string has ended, with its new token number num_tokens."""

    request_id: int
    num_tokens: int


class Seen(Message, frozen=True):
    """News of requests with stop strings.

    Attributes:
        nums_tokens: Number of each request's first new tokens that contain no whole stop string, by id.
    """

    nums_tokens: dict[int, int]


class Close(Message, frozen=True):
    """The end of all requests."""


class Drain(Message, frozen=True):
    """A launcher or user stops the job: the HTTP process takes no more requests, and answers with `Close`."""


class Output(NamedTuple):
    """The new tokens of a request in one step. The HTTP process adds their text (`RequestText`).

    Attributes:
        text: Text that became certain, maybe empty.
        token_ids: New tokens.
        logprobs: Log probabilities of the new tokens, where they are asked for.
        finish_reason: Reason of the end, with the last token.
        num_cached_tokens: Tokens of the prompt that an earlier request had computed.
        queue_seconds: Time from the request's arrival at the engine to its first step.
        prompt_logprobs: Log probabilities of the prompt's next tokens, before or with the first new token.
        error: Reason of the finish_reason "error"; without one, the reason for which the engine refuses the request.
        stop_string: Stop string that ended the request, with the last token; empty for any other end.
        offsets: Index of each new token's first character in the request's text (`TextStream.push`).
    """

    request_id: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str = ""
    stop_string: str = ""
    offsets: tuple[int, ...] = ()
    queue_seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Return the number of new tokens."""
        return len(self.token_ids)


def merged(outputs: Sequence[Output]) -> list[Output]:
    """Return outputs, joining the outputs of each request."""
    by_id: dict[int, list[Output]] = {}
    for output in outputs:
        by_id.setdefault(output.request_id, []).append(output)
    return [parts[0] if len(parts) == 1 else joined(parts) for parts in by_id.values()]


def joined(parts: Sequence[Output]) -> Output:
    """Return the outputs of a request as one, in time proportional to their length."""
    lists = ("token_ids", "logprobs", "offsets", "prompt_logprobs")
    whole: dict[str, Any] = {name: tuple(chain.from_iterable(getattr(each, name) for each in parts)) for name in lists}
    return parts[-1]._replace(text="".join(each.text for each in parts), **whole)


class Report(Message, frozen=True):
    """A step's outputs, and the engine's state after it; an idle engine sends one about every second.

    Attributes:
        num_bytes: Bytes of commands that the ranks took since the start.
        cache_use: Part of the cache's blocks that running requests hold, in [0, 1].
        totals: Totals since the engine's start, by the name of a metric and its labels. Copies to and from other tiers
            of memory, and transfers with other jobs, are the first rank's.
        readers: Names of the jobs that read blocks of this one, or are to read them.
        num_unseen: New tokens of a request still to be searched for stop strings, of the request with most.
    """

    outputs: list[Output]
    num_bytes: int
    num_running: int
    num_waiting: int
    cache_use: float
    totals: dict[tuple[str, ...], float]
    readers: list[str] = []
    num_unseen: int = 0


class Stopped(Message, frozen=True):
    """The last message of the ranks, unless they fail."""


Command = Submit | Abort | Stop | Seen | Connect | Disconnect | Pull | First | Lose | Close
RanksMessage = Opened | Started | Wanted | Report | Drain | Stopped
_ENCODER = msgspec.msgpack.Encoder()
_COMMANDS, _OF_RANKS = msgspec.msgpack.Decoder(Command), msgspec.msgpack.Decoder(RanksMessage)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return tokens as messages have them, int32: msgpack's lists of a million numbers take 30 ms to read."""
    return np.asarray(token_ids, dtype=np.int32).tobytes()


def unpack_tokens(packed: bytes) -> "array[int]":
    """Return tokens that a message has, int64.

    Raises:
        ValueError: The bytes are no tokens.
    """
    return array("q", np.frombuffer(packed, dtype=np.int32).astype(np.int64).tobytes())


def pack(message: Message) -> bytes:
    """Return a message as it travels."""
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body


def unpack_commands(packed: bytes) -> Iterator[Command]:
    """Yield the commands that were packed one after the other.

    Raises:
        ValueError: The next one is no command, or a field has a value that is not allowed.
    """
    end = 0
    while end < len(packed):
        start = end + LENGTH.size
        end = start + LENGTH.unpack_from(packed, end)[0]
        yield _COMMANDS.decode(memoryview(packed)[start:end])


def unpack(body: bytes) -> RanksMessage:
    """Return a message of the first rank, packed less its length."""
    return _OF_RANKS.decode(body)
