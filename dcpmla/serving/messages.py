"""Messages between the HTTP process and the ranks, and how they travel, each after its length.

Commands are JSON and token ids: clients may attack the HTTP process, and even if they took it over, no rank would run
their code. The first rank's messages are pickles, because a tokenizer has no other form. Only the HTTP process, which
that rank has forked, and the worker that this has forked, unpickle them; no other process holds an end of their socket
pairs.
"""

import json
import pickle
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, NamedTuple, get_args

import numpy as np

from dcpmla.runtime.request import TokenLogprobs
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.transfer_messages import STAYS, Connect, Disconnect, First, Lose, Move, Pull, move_of, token_of

LENGTH = struct.Struct("<Q")
BEAT = LENGTH.pack(0)  # A message without content: the HTTP process runs.
_HEADER = struct.Struct("<I")  # length of a command's JSON, which token ids follow
_TOKEN = np.dtype("<i4")


@dataclass(frozen=True)
class Started:
    """The model, once the ranks are ready.

    Attributes:
        tokenizer: Tokenizer of transformers; None where it does not load, for the reason no_tokenizer.
        max_model_len: Longest sequence, prompt and new tokens, that the model takes and the cache holds.
        max_num_seqs: Limit of requests that run at the same time.
        num_cache_tokens: Tokens that the whole cache holds.
        model_type: Name of the model's family in its config.
        text_type: Name of the family of its text model, which may be another.
        encoder: Text of the checkpoint's own encoder of chats, empty without one.
        eos_token_ids: End-of-sequence tokens.
        no_grammars: Reason why no request may have a grammar; empty if requests may.
        link: This job, for others that exchange blocks with it; None if it exchanges none.
    """

    tokenizer: Any
    no_tokenizer: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_cache_tokens: int
    model_type: str = ""
    text_type: str = ""
    encoder: str = ""
    eos_token_ids: Sequence[int] = ()
    no_grammars: str = ""
    link: Connect | None = None


@dataclass(frozen=True)
class Submit:
    """A prompt for the engine, and a request for each choice.

    Attributes:
        request_ids: Id of each choice.
        seeds: Seed of each choice, in place of the params'.
        cache_salt: Salt of the keys of its blocks, "" for none.
        move: Its part in a transfer between two jobs.
    """

    request_ids: list[int]
    seeds: list[int]
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    move: Move = STAYS


@dataclass(frozen=True)
class Abort:
    """Requests whose client is gone."""

    request_ids: list[int]


@dataclass(frozen=True)
class Stop:
    """A request that a stop string has ended, with its new token number num_tokens."""

    request_id: int
    num_tokens: int


@dataclass(frozen=True)
class Seen:
    """Requests with stop strings, and for each the number of its first new tokens in which none ends."""

    request_ids: list[int]
    nums_tokens: list[int]


@dataclass(frozen=True)
class Close:
    """The end of all requests."""


@dataclass(frozen=True)
class Drain:
    """A launcher or user stops the job: the HTTP process takes no more requests, and answers with `Close`."""


class Output(NamedTuple):
    """The new tokens of a request in one step. The HTTP process adds their text (`RequestText`).

    Attributes:
        text: Text that became certain, maybe empty.
        token_ids: New tokens.
        logprobs: Log probabilities of the new tokens, where they are asked for.
        finish_reason: Reason of the end, with the last token.
        num_cached_tokens: Tokens of the prompt that an earlier request had computed.
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
    return parts[-1]._replace(
        text="".join(part.text for part in parts),
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        offsets=tuple(chain.from_iterable(part.offsets for part in parts)),
        prompt_logprobs=tuple(chain.from_iterable(part.prompt_logprobs for part in parts)),
    )


@dataclass(frozen=True)
class Report:
    """A step's outputs, and the engine's state after it; an idle engine sends one about every second.

    Attributes:
        num_bytes: Bytes of commands that the ranks took since the start.
        cache_use: Part of the cache's blocks that running requests hold, in [0, 1].
        totals: Totals since the engine's start, by the names of metrics.
        tier_totals: Totals of copies between the cache and other tiers of memory on the first rank, by the name of a
            metric, the tier and the direction ("load" or "store").
        transfer_totals: Totals of transfers with other jobs on the first rank, by the name of a metric and its labels.
        readers: Names of the jobs that read blocks of this one, or are to read them.
        num_unseen: New tokens of a request still to be searched for stop strings, of the request with most.
    """

    outputs: list[Output]
    num_bytes: int
    num_running: int
    num_waiting: int
    cache_use: float
    totals: dict[str, int]
    tier_totals: dict[tuple[str, str, str], float] = field(default_factory=dict)
    transfer_totals: dict[tuple[str, ...], float] = field(default_factory=dict)
    readers: Sequence[str] = ()
    num_unseen: int = 0


@dataclass(frozen=True)
class Stopped:
    """The last message of the ranks, unless they fail."""


Command = Submit | Abort | Stop | Seen | Connect | Disconnect | Pull | First | Lose | Close
_COMMANDS = {kind.__name__: kind for kind in get_args(Command)}


def pack_command(command: Command) -> bytes:
    """Return a command as it travels."""
    fields = {**vars(command)}
    token_ids = np.asarray(fields.pop("prompt_token_ids", []), dtype=_TOKEN).tobytes()
    if isinstance(command, Submit):
        fields["params"] = asdict(command.params)
    header = json.dumps({"kind": type(command).__name__, **fields}).encode()
    length = _HEADER.size + len(header) + len(token_ids)
    return b"".join([LENGTH.pack(length), _HEADER.pack(len(header)), header, token_ids])


def unpack_commands(packed: bytes) -> Iterator[Command]:
    """Yield the commands that were packed one after the other."""
    start = 0
    while start < len(packed):
        (length,) = LENGTH.unpack_from(packed, start)
        (header_length,) = _HEADER.unpack_from(packed, start + LENGTH.size)
        start, end = start + LENGTH.size + _HEADER.size, start + LENGTH.size + length
        fields = json.loads(packed[start : start + header_length])
        kind = _COMMANDS[fields.pop("kind")]
        if kind is Submit:
            fields["params"] = SamplingParams.from_dict(fields["params"], SamplingParams())
            fields["prompt_token_ids"] = np.frombuffer(packed[start + header_length : end], dtype=_TOKEN).tolist()
            fields["move"] = move_of(*fields["move"])
        elif kind is First:
            fields["token"] = token_of(fields["token"])
        yield kind(**fields)
        start = end


def pack(message: object) -> bytes:
    """Return a message of the first rank, or to the worker, as it travels."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Any:
    """Return a message of the first rank, or to the worker, packed less its length."""
    return pickle.loads(body)
