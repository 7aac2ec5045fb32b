"""Host memory on a CPU whose copies end late, as those of a GPU do."""

from collections.abc import Callable, Sequence
from typing import Any

from dcpmla.cache.copies import Copy
from dcpmla.cache.host import HostMemory


class LateCopy(Copy):
    """A copy that runs when it has been asked a number of times whether it is done, or when something waits for it."""

    def __init__(self, run: Callable[[], object], num_polls: int) -> None:
        super().__init__()
        self._run, self._num_polls, self._has_run = run, num_polls, False

    @property
    def is_done(self) -> bool:
        self._num_polls -= 1
        if self._num_polls < 0:
            self.wait()
        return self._has_run

    def wait(self, stream: object = None) -> None:
        if not self._has_run:
            self._has_run = True
            self._run()

    def cancel(self) -> None:
        self._has_run = True

    def wait_by_layer(self, loads: Sequence[Any]) -> None:
        self.wait()


class LateMemory(HostMemory):
    """Host memory whose copies run as late as they may.

    Attributes:
        num_polls: How often a copy is asked whether it is done before it is.
    """

    num_polls = 3

    def load(self, blocks: Sequence[int], slots: Sequence[int], state: tuple[int, int] | None = None) -> Copy:
        self._last_store.wait()
        copy_in = super().load
        return LateCopy(lambda: copy_in(blocks, slots, state), self.num_polls)

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Copy:
        copy_out, before = super().store, self._last_store

        def run() -> None:
            before.wait()
            latest = self._last_store
            copy_out(blocks, slots)
            self._last_store = latest

        late = self._last_store = LateCopy(run, self.num_polls)
        return late
