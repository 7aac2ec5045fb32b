"""The layout of a job's cache, as other jobs see it (`CacheLayout`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dcpmla.cache.layers import Cache
from dcpmla.config import DCPConfig
from dcpmla.ownership import Owner


class TokenSpec(NamedTuple):
    """Rows of positions in one tensor (`dcpmla.cache.rows.TokenRows`), and the layer that they belong to; -1: none."""

    name: str
    layer: int
    row_bytes: int
    per_block: int
    span: int
    is_shared: bool
    num_shares: int = 1


class StateSpec(NamedTuple):
    """Rows of states in one tensor on one rank (`dcpmla.cache.rows.StateRows`)."""

    name: str
    row_bytes: int
    num_rows: int
    num_last: int
    num_parts: int


@dataclass(frozen=True)
class CacheLayout:
    """The layout of a job's cache.

    Attributes:
        tp_size, dcp_size, interleave: See `DCPConfig`.
        tokens: Tensors with rows of positions, layer by layer.
        states: Tensors with rows of states.
        facts: Names and values that must be the same in two jobs that exchange rows.
    Raises:
        ValueError: A size is less than 1, or dcp_size does not divide tp_size.
    """

    tp_size: int
    dcp_size: int
    interleave: int
    tokens: tuple[TokenSpec, ...]
    states: tuple[StateSpec, ...]
    facts: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        sizes = [self.tp_size, self.dcp_size, self.interleave]
        sizes += [size for spec in self.tokens for size in (spec.row_bytes, spec.per_block, spec.span, spec.num_shares)]
        sizes += [size for each in self.states for size in (each.row_bytes, each.num_rows, each.num_last)]
        counts = [*sizes, *(spec.layer + 1 for spec in self.tokens), *(each.num_parts for each in self.states)]
        if min(sizes) < 1 or min(counts) < 0:
            raise ValueError("layout is no layout of a cache: its sizes must be whole numbers of at least 1")
        if self.tp_size % self.dcp_size:
            words = f"dcp_size {self.dcp_size} does not divide tp_size {self.tp_size}"
            raise ValueError(f"layout is no layout of a cache: {words}")
        if any(self.num_groups % spec.num_shares for spec in self.tokens):
            raise ValueError("layout is no layout of a cache: num_shares does not divide tp_size / dcp_size")

    @property
    def num_groups(self) -> int:
        """Return the number of DCP groups."""
        return self.tp_size // self.dcp_size

    def owner(self, tp_rank: int) -> Owner:
        """Return a rank of the job as the owner of tokens."""
        return Owner(tp_rank % self.dcp_size, self.dcp_size, self.interleave)

    def check_matches(self, target: "CacheLayout") -> None:
        """Check that this job's rows are rows of another job's cache.

        Raises:
            ValueError: They are not; the message names the first difference.
        """
        here, there = dict(self.facts), dict(target.facts)
        for name in here | there:
            if here.get(name) != there.get(name):
                values = f"{here.get(name)} on the prefill server and {there.get(name)} on the decode server"
                raise ValueError(f"{name} is {values}")
        num_layers = [1 + max((spec.layer for spec in each.tokens), default=-1) for each in (self, target)]
        if num_layers[0] != num_layers[1]:
            raise ValueError(
                f"the prefill server caches {num_layers[0]} layers and the decode server {num_layers[1]}; an MTP "
                "module is a layer, so give both the same --speculative-method"
            )
        kinds = [*zip(self._common_rows(), target._common_rows(), strict=True)]
        for own, other in (pair for kind in kinds for pair in zip(*kind, strict=False)):
            if own != other:
                sizes = ", ".join(
                    f"{name} is {sent} on the prefill server and {received} on the decode server"
                    for name, sent, received in zip(own._fields, own, other, strict=False)
                    if sent != received
                )
                raise ValueError(f"rows of {own.name} differ: {sizes}")
        if any(len(sent) != len(received) for sent, received in kinds):
            raise ValueError("the two servers cache different kinds of rows; do they serve the same model?")

    def _common_rows(self) -> tuple[Sequence[TokenSpec | StateSpec], Sequence[TokenSpec | StateSpec]]:
        """Return the rows of positions and of states, less what may differ between two jobs: whole rows of all groups,
        and states of all ranks.
        """
        return [
            spec._replace(per_block=0, row_bytes=spec.row_bytes * spec.num_shares, num_shares=1) for spec in self.tokens
        ], [
            spec._replace(num_rows=0, row_bytes=spec.row_bytes * (self.tp_size if spec.num_parts else 1))
            for spec in self.states
        ]


def describe(cache: Cache, dcp: DCPConfig, facts: Sequence[tuple[str, str]] = ()) -> CacheLayout:
    """Return the layout of a cache under a config."""
    return CacheLayout(
        dcp.tensor_parallel_size,
        dcp.decode_context_parallel_size,
        cache.sizes.interleave,
        tuple(
            TokenSpec(each.name, layer, each.rows.num_bytes, each.per_block, each.span, *each[4:])
            for layer, rows in enumerate([cache.shared_rows, *cache.token_rows], -1)
            for each in rows
        ),
        tuple(
            StateSpec(each.name, each.rows.num_bytes, each.num_rows, each.num_last, each.num_parts)
            for each in cache.state_rows
        ),
        tuple(facts),
    )
