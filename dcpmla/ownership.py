"""Ownership of tokens: the index arithmetic of decode context parallelism (DCP).

W = dcp_size ranks store the tokens of a sequence in turn, I = interleave consecutive tokens each. Rank (p // I) % W
stores the token at position p. The token's index among the tokens of that rank, its local index, is
(p // (W * I)) * I + p % I. In a paged cache a block id covers block_size tokens on each rank: block_size * W positions.

Nothing here depends on torch.distributed.
"""

from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

# Deterministic attention sums over tiles of TILE positions; tile i is in lane i % NUM_TILE_LANES. With an interleave of
# TILE a rank of W stores whole lanes, those whose remainder by W is its own number.
TILE, NUM_TILE_LANES = 64, 8
Integers = TypeVar("Integers", int, Tensor, np.ndarray)


class _Fields(NamedTuple):
    rank: int
    size: int
    interleave: int


class Owner(_Fields):
    """A rank of a DCP group, as the owner of tokens.

    Methods take and return Python ints or integer tensors or arrays of any shape. Ints must not be negative; tensors
    are not checked, because that would synchronize with the GPU.

    Args:
        rank: Rank in the group, in [0, size).
        size: Number W of ranks that share the tokens.
        interleave: Number I of consecutive tokens on a rank.
    Raises:
        ValueError: size or interleave is below 1, or rank is outside [0, size).
    """

    __slots__ = ()

    def __new__(cls, rank: int = 0, size: int = 1, interleave: int = 1) -> "Owner":
        if size < 1:
            raise ValueError(f"dcp_size is {size}; it must be at least 1")
        if interleave < 1:
            words = f"interleave (--cp-kv-cache-interleave-size) is {interleave}; it must be at least 1"
            raise ValueError(words)
        if not 0 <= rank < size:
            raise ValueError(f"dcp_rank is {rank}; with dcp_size {size} it must be in [0, {size})")
        return super().__new__(cls, rank, size, interleave)

    def rank_of(self, position: Integers) -> Integers:
        """Return the rank, in [0, size), that stores the token at a 0-based position of its sequence."""
        _check_non_negative("position", position)
        return position // self.interleave % self.size

    def local_index(self, position: Integers) -> Integers:
        """Return the index of the token at a position among the tokens of its rank."""
        _check_non_negative("position", position)
        return position // (self.size * self.interleave) * self.interleave + position % self.interleave

    def global_position(self, index: Integers) -> Integers:
        """Return the position of this rank's token with a local index, the inverse of `local_index`."""
        _check_non_negative("index", index)
        group, place = index // self.interleave, index % self.interleave
        return group * (self.size * self.interleave) + self.rank * self.interleave + place

    def local_seq_lens(self, seq_lens: Integers) -> Integers:
        """Return the number of tokens of each sequence that this rank stores: an int, or int32.

        Args:
            seq_lens: Lengths of whole sequences.
        """
        _check_non_negative("seq_lens", seq_lens)
        whole = seq_lens // (self.size * self.interleave) * self.interleave
        rest = seq_lens % (self.size * self.interleave) - self.rank * self.interleave
        if isinstance(seq_lens, np.ndarray):  # ndarray.clip takes ten times as long
            return (whole + np.minimum(np.maximum(rest, 0), self.interleave)).astype(np.int32)
        if isinstance(seq_lens, Tensor):
            return (whole + rest.clamp(0, self.interleave)).to(torch.int32)
        return whole + min(max(rest, 0), self.interleave)

    def slot_mapping(self, positions: Tensor, block_table_rows: Tensor, block_size: int) -> Tensor:
        """Map tokens to cache slots (block id x block_size + offset) on this rank, -1 for other ranks' tokens.

        DeepSeek-V4's compressor calls it on the device; `step/metadata.py: lay_out` maps the tokens of a step.

        Args:
            positions: Positions [T] of tokens in their sequences; a negative position (padding) gets -1.
            block_table_rows: Block ids [T, max_blocks] of each token's sequence, or [max_blocks] if all tokens belong
                to one sequence.
            block_size: Tokens of a block on one rank.
        Returns:
            [T] int64.
        Raises:
            ValueError: block_size is below 1, or the interleave does not divide it.
        """
        check_block_size(block_size, self.interleave)
        rows = block_table_rows.to(positions.device, torch.int64).expand(positions.shape[0], -1)
        mine = (positions >= 0) & (self.rank_of(positions) == self.rank)
        index = self.local_index(positions).where(mine, 0)
        blocks = rows.gather(1, (index // block_size)[:, None])[:, 0]
        return (blocks * block_size + index % block_size).where(mine, -1)

    def window_bound(self, window: int) -> int:
        """Return an upper bound on the tokens that one rank owns of `window` consecutive positions (DeepSeek-V4)."""
        return min(window, (window // (self.size * self.interleave) + 2) * self.interleave)


def check_block_size(block_size: int, interleave: int) -> None:
    """Raise ValueError if block_size is below 1, or interleave does not divide it."""
    if block_size < 1:
        raise ValueError(f"block_size (--block-size) is {block_size}; it must be at least 1")
    if block_size % interleave:  # a block would end between consecutive tokens of a rank
        raise ValueError(
            f"cp_kv_cache_interleave_size (--cp-kv-cache-interleave-size) is {interleave}; "
            f"it must divide block_size (--block-size) {block_size}"
        )


def _check_non_negative(name: str, value: int | Tensor | np.ndarray) -> None:
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{name} is {value}; it must not be negative")
