"""The load of several servers, and the predictions of one server under it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from dcpmla.fields import check_fields, number, option_label, rules_of, whole
from dcpmla.planning.setting import Setting


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Requests that arrive as a Poisson process, all of the same lengths.

    Attributes:
        request_rate: Requests that arrive in a second. `plan` divides GPUs into prefill and decode servers for them.
        input_len: Tokens of a prompt.
        output_len: New tokens of a request that arrives.
    """

    request_rate: Annotated[float, number(0, 1e6, above=True)]
    input_len: Annotated[int, whole(1, 1 << 24)] = 8192
    output_len: Annotated[int, whole(2, 1 << 24)] = 512

    def __post_init__(self) -> None:
        check_fields(rules_of(Traffic), vars(self), option_label)


class Piece(NamedTuple):
    """A step of a prompt: the number of the prompt's tokens in it, and its microseconds."""

    num_tokens: int
    time_us: float


@dataclass(frozen=True, kw_only=True)
class Server:
    """Predicted sizes and times of one server for requests of one length.

    Attributes:
        setting: Layout of its model and cache, over one TP group.
        num_prompts: Number of prompts that the cache of one that prefills holds at once.
        num_requests, num_decodes: Number of whole requests that one for both, or one that decodes, holds at once, and
            that leave room for prompts in its steps.
        bytes_per_token, bytes_per_state: Size of a token's rows in all layers, one copy, and of a request's state on
            each rank.
        pieces: Function that returns the steps of a prompt while so many requests decode.
        decode_us: Function that returns the microseconds of a step in which so many requests decode, without a prompt.
    """

    setting: Setting
    num_prompts: int
    num_requests: int
    num_decodes: int
    bytes_per_token: int
    bytes_per_state: int
    pieces: Callable[[int], Sequence[Piece]]
    decode_us: Callable[[int], float]
