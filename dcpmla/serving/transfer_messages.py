"""Messages on prompts that one job prefills for another (`dcpmla.serving.messages` has their form)."""

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dcpmla.runtime.request import TokenLogprobs
from dcpmla.runtime.sampling import SamplingParams


@dataclass(frozen=True)
class Connect:
    """Another job, to exchange blocks with.

    Attributes:
        engine: Its name; a job that starts again has another one.
        layout: JSON object of its cache's layout (`CacheLayout.to_json`).
        agents: Metadata of the transports of all its ranks, in base64.
    """

    engine: str
    layout: dict[str, Any]
    agents: list[str]


@dataclass(frozen=True)
class Disconnect:
    """The end of a job that exchanged blocks with this one."""

    engine: str


@dataclass(frozen=True)
class Wanted:
    """A request that waits for another job's prefill.

    Attributes:
        params: Parameters of the request, with its seed.
    """

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str


@dataclass(frozen=True)
class Pull:
    """The job that prefills a request that was wanted, and the handoff's name there."""

    request_id: int
    engine: str
    handoff: str


@dataclass(frozen=True)
class First:
    """The first token of a request, which another job has sampled, with its log probability if they are asked for."""

    request_id: int
    token: TokenLogprobs


@dataclass(frozen=True)
class Lose:
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


def token_of(content: Any) -> TokenLogprobs:
    """Return a token from its JSON.

    Raises:
        ValueError: It is none.
    """
    try:
        token_id, logprob, top = content
        pairs = tuple((operator.index(each), float(number)) for each, number in top)
        return TokenLogprobs(operator.index(token_id), None if logprob is None else float(logprob), pairs)
    except TypeError as error:
        raise ValueError(f"{content!r} is no token with its log probabilities: {error}") from error


def move_of(handoff: str, source: list[str] | None, first: Any, reader: str) -> Move:
    """Return a prompt's part in a transfer from its JSON."""
    pair = None if source is None else (source[0], source[1])
    return Move(handoff, pair, None if first is None else token_of(first), reader)
