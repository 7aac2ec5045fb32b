"""Changes of the blocks that a cache or host memory remembers, for programs that follow their content."""

from collections.abc import Sequence
from typing import NamedTuple

GPU, HOST = "GPU", "CPU"  # media, by vLLM's names


class Stored(NamedTuple):
    """Neighbouring blocks of a sequence that can be found from now on.

    Attributes:
        keys: Keys of the blocks, in the order of their tokens.
        previous: Key of the block before them; None if they begin the sequence.
        token_ids: Tokens of the blocks.
        cache_salt: Salt of the sequence, "" for none.
        medium: GPU or HOST.
    """

    keys: Sequence[bytes]
    previous: bytes | None
    token_ids: Sequence[int]
    cache_salt: str = ""
    medium: str = GPU


class Removed(NamedTuple):
    """A block that cannot be found in a medium any more."""

    key: bytes
    medium: str = GPU


class Cleared(NamedTuple):
    """The end of all blocks of the cache."""


BlockEvent = Stored | Removed | Cleared
