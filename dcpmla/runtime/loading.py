"""A request's blocks and state on their way from host memory (`Loading`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Arrival(Protocol):
    """A copy into the cache (`dcpmla.cache.copies.Copy`)."""

    def cancel(self) -> None: ...


@dataclass(eq=False)
class Loading:
    """Content of host memory that a request continues from.

    Attributes:
        keys: Keys of blocks in host memory.
        blocks: Blocks of the cache that they are copied into.
        state: Key of the state in host memory, and number of the state that it is copied into; None without one.
        copy: Copy of it; None until it is queued.
        has_ended: Whether all ranks have agreed that it has ended.
    """

    keys: Sequence[bytes]
    blocks: Sequence[int]
    state: tuple[bytes, int] | None = None
    copy: Arrival | None = None
    has_ended: bool = False

    def cancel(self) -> None:
        """Drop the parts that are not queued. Later steps write to the blocks after the queued ones."""
        if self.copy is not None:
            self.copy.cancel()
