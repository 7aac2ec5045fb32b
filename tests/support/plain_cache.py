"""Caches of few bytes with rows of every kind, and the content of prompts in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from dcpmla.cache.layers import Cache
from dcpmla.cache.rows import StateRows, TokenRows
from dcpmla.transfer.layout import CacheLayout, StateSpec, TokenSpec
from dcpmla.transfer.parts import RowMover

ROW, ID_ROW, STATE = 16, 8, 8  # bytes


def new_layout(tp: int, dcp: int, interleave: int, num_shares: int = 1, row: int = ROW) -> CacheLayout:
    """Return a layout whose blocks have so many runs of two rows on each rank."""
    rows = 2 * interleave * num_shares
    tokens = (
        TokenSpec("ids", -1, ID_ROW, rows * dcp, 1, True),
        TokenSpec("first", 0, row, rows, 1, False),
        TokenSpec("second", 1, row, rows, 1, False),
        TokenSpec("pairs", 1, row, rows // 2, 2, False),  # a row for two positions
    )
    return CacheLayout(tp, dcp, interleave, tokens, (StateSpec("state", STATE, 1, 1, 0),))


def random_bytes(*shape: int, generator: torch.Generator | None = None) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@dataclass
class Content:
    """The rows [n, row bytes] of a prompt in each tensor, and its state."""

    num_tokens: int
    rows: list[Tensor]
    state: Tensor

    @classmethod
    def of(cls, layout: CacheLayout, number: int, most_tokens: int) -> "Content":
        """Return the content of a prompt with a number, whatever the layout's ranks."""
        generator, num_tokens = torch.Generator().manual_seed(number), Random(number).randint(1, most_tokens)
        rows = [random_bytes(num_tokens // spec.span, spec.row_bytes, generator=generator) for spec in layout.tokens]
        return cls(num_tokens, rows, random_bytes(STATE, generator=generator))


class PlainCache:
    """The cache of one rank: tensors [num_blocks, rows of a block, row bytes], states [num_states, bytes]."""

    def __init__(self, layout: CacheLayout, rank: int, num_blocks: int, num_states: int, device: str = "cpu") -> None:
        self.layout, self.rank = layout, rank
        self.tensors = [random_bytes(num_blocks, spec.per_block, spec.row_bytes).to(device) for spec in layout.tokens]
        self.states = random_bytes(num_states, STATE).to(device)
        rows = [TokenRows.of(spec.name, tensor) for spec, tensor in zip(layout.tokens, self.tensors, strict=True)]
        cache: Any = SimpleNamespace(
            tensors=[*self.tensors, self.states],
            shared_rows=rows[:1],
            token_rows=[rows[1:2], rows[2:]],
            state_rows=[StateRows("state", TokenRows.of("state", self.states[:, None]).rows, 1, 1)],
        )
        self.mover = RowMover(cast(Cache, cache), layout)

    def places(self, tensor: int, start: int, end: int, blocks: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's rows of positions [start, end) of a sequence, their blocks, and offsets in these."""
        layout, spec = self.layout, self.layout.tokens[tensor]
        index = rows = torch.arange(start // spec.span, end // spec.span)
        if not spec.is_shared:
            share = layout.dcp_size * layout.interleave
            rows = rows[rows % share // layout.interleave == self.rank % layout.dcp_size]
            index = rows // share * layout.interleave + rows % layout.interleave
        return rows, torch.tensor(blocks)[index // spec.per_block], index % spec.per_block

    def fill(self, content: Content, blocks: Sequence[int], start: int, end: int) -> None:
        """Compute positions [start, end) of a prompt."""
        for tensor, memory in enumerate(self.tensors):
            rows, *places = self.places(tensor, start, end, blocks)
            memory[tuple(places)] = content.rows[tensor][rows].to(memory.device)

    def check(self, content: Content, blocks: Sequence[int], state: int, start: int = 0) -> None:
        """Compare the rows that end at positions from `start` on, and the state."""
        for tensor, spec in enumerate(self.layout.tokens):
            rows, *places = self.places(tensor, start, content.num_tokens, blocks)
            assert torch.equal(self.tensors[tensor][tuple(places)].cpu(), content.rows[tensor][rows]), (spec.name, rows)
        assert torch.equal(self.states[state].cpu(), content.state)

    def overwrite(self, blocks: list[int], state: int) -> list[Tensor]:
        """Write random bytes to blocks and a state; return them."""
        for tensor in self.tensors:
            tensor[blocks] = random_bytes(*tensor[blocks].shape).to(tensor.device)
        self.states[state] = random_bytes(STATE)
        return self.read(blocks)

    def read(self, blocks: list[int]) -> list[Tensor]:
        return [tensor[blocks].clone() for tensor in self.tensors]
