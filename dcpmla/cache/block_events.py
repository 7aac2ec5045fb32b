"""Changes of the blocks that a cache remembers, for programs that follow its content."""

from collections.abc import Sequence
from typing import NamedTuple


class Stored(NamedTuple):
    """Neighbouring blocks of a sequence that can be found from now on.

    Attributes:
        keys: Keys of the blocks, in the order of their tokens.
        previous: Key of the block before them; None if they begin the sequence.
        token_ids: Tokens of the blocks.
        cache_salt: Salt of the sequence, "" for none.
    """

    keys: Sequence[bytes]
    previous: bytes | None
    token_ids: Sequence[int]
    cache_salt: str = ""


class Removed(NamedTuple):
    """A block that cannot be found any more."""

    key: bytes


class Cleared(NamedTuple):
    """The end of all blocks."""


BlockEvent = Stored | Removed | Cleared
