"""Transfers between the caches of two engines in one process, as late and as unreliable as they may be."""

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from dcpmla.runtime.engine import Engine
from tests.support.hash_model import BLOCK

_PATIENCE = 40  # looks at a handoff without readers until its lease ends


class WireHandoff:
    """A handoff whose rows leave the cache only when the other side looks."""

    def __init__(self, rows: Tensor, reader: str) -> None:
        self._rows = rows
        self._blocks: list[int] = []
        self._num_tokens = self._num_looks = 0
        self.length: int | None = None
        self.is_asked_for = self.is_read = self.has_failed = False
        self.num_bytes, self.seconds, self.engine = 8, 0.5, reader

    def computed(self, blocks: Sequence[int], num_tokens: int, starts: Sequence[object]) -> None:
        assert self.length is None
        self._blocks, self._num_tokens = [*blocks], num_tokens

    def retract(self) -> None:
        self._blocks, self._num_tokens = [], 0

    def finish(self, num_tokens: int, state: int | None) -> None:
        assert state is None
        assert self.has_failed or num_tokens == self._num_tokens
        self.length = num_tokens

    def cancel(self) -> None:
        self.retract()
        self.has_failed = True

    @property
    def is_done(self) -> bool:
        if not self.is_asked_for:
            self._num_looks += self.length is not None
            if self._num_looks > _PATIENCE:
                self.cancel()
        return self.has_failed or self.is_read

    def read(self, position: int) -> Tensor | None:
        """Return a row [2], None if it is not there yet."""
        if self.has_failed or position >= self._num_tokens:
            return None
        block, offset = divmod(position, BLOCK)
        return self._rows[self._blocks[block] * BLOCK + offset].clone()


class WireArrival:
    """An arrival whose rows come when it is looked at, some at a time."""

    def __init__(self, wire: "Wire", name: str, start: int, num_tokens: int, blocks: Sequence[int]) -> None:
        self._wire, self._name, self._blocks = wire, name, [*blocks]
        self._next, self._end = start, num_tokens
        self.is_done = self.has_failed = False
        self.num_bytes, self.seconds = 8, 0.5

    def cancel(self) -> None:
        if not self.is_done:
            self._fail()

    def advance(self) -> None:
        """Write the next rows, or fail."""
        handoff = self._wire.handoffs.get(self._name)
        if self.is_done or handoff is None:
            return
        handoff.is_asked_for = True
        if handoff.has_failed or self._wire.rng.random() < self._wire.share_failing:
            self._fail()
            return
        for _ in range(self._wire.rng.randint(0, 30)):
            if self._next < self._end and (row := handoff.read(self._next)) is not None:
                block, offset = divmod(self._next, BLOCK)
                self._wire.rows_there[self._blocks[block] * BLOCK + offset] = row
                self._next += 1
        if handoff.length is not None and self._next == self._end:
            assert handoff.length == self._end
            self.is_done = handoff.is_read = True

    def _fail(self) -> None:
        self.is_done = self.has_failed = True
        if (handoff := self._wire.handoffs.get(self._name)) is not None:
            handoff.cancel()


class Wire:
    """Both ends of the transfers from one engine to another.

    Args:
        share_failing: Part of the looks at a transfer at which it fails.
    """

    def __init__(self, here: Engine, there: Engine, rng: Random, share_failing: float = 0.0) -> None:
        self.rows_here, self.rows_there = (engine.cache.tensors[0].view(-1, 2) for engine in (here, there))
        self.rng, self.share_failing = rng, share_failing
        self.handoffs: dict[str, WireHandoff] = {}
        self.arrivals: list[WireArrival] = []
        self.touched: list[tuple[str, str]] = []
        end: Any = self
        here.link(end, None)
        there.link(None, end)

    def begin(self, handoff: str, reader: str) -> WireHandoff:
        self.handoffs[handoff] = begun = WireHandoff(self.rows_here, reader)
        return begun

    def touch(self, engine: str, handoff: str) -> None:
        self.touched.append((engine, handoff))

    def decline(self, engine: str, handoff: str) -> None:
        assert engine == "prefill"
        self.handoffs[handoff].cancel()

    def open(
        self, engine: str, handoff: str, start: int, num_tokens: int, blocks: Sequence[int], state: int | None
    ) -> WireArrival:
        assert (engine, state) == ("prefill", None)
        assert torch.isfinite(self.rows_there[torch.tensor(blocks)[: start // BLOCK] * BLOCK]).all()
        self.arrivals.append(WireArrival(self, handoff, start, num_tokens, blocks))
        return self.arrivals[-1]

    def advance(self) -> None:
        """Let all transfers go on."""
        for arrival in self.arrivals:
            arrival.advance()

    def close(self) -> None:
        pass
