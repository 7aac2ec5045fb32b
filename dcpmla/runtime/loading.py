"""A request's blocks and state on their way into the cache: from host memory (`Loading`), or from the cache of another
job (`Arriving`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol


class Stoppable(Protocol):
    """A copy into the cache (`dcpmla.cache.copies.Copy`, `dcpmla.transfer.incoming.Arrival`)."""

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
    copy: Stoppable | None = None
    has_ended: bool = False
    can_join: ClassVar[bool] = True  # a step may begin before it has ended, and wait for it on the device

    def cancel(self) -> None:
        """Drop the parts that are not queued. Later steps write to the blocks after the queued ones."""
        if self.copy is not None:
            self.copy.cancel()


@dataclass(eq=False)
class Arriving:
    """A prompt that another job prefills. Its request is no part of a step until this has ended.

    Attributes:
        copy: Transfer of its blocks and state; None until the other job is known.
    """

    copy: Stoppable | None = None
    has_ended: ClassVar[bool] = False  # at its end the request forgets it
    can_join: ClassVar[bool] = False

    def cancel(self) -> None:
        """Stop the transfer. Later steps may write to the blocks."""
        if self.copy is not None:
            self.copy.cancel()
