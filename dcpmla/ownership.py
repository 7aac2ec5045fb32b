"""Ownership of tokens: the index arithmetic of decode context parallelism (DCP).

W = dcp_size ranks store the tokens of a sequence in turn, I = interleave consecutive tokens each. Rank (p // I) % W
stores the token at position p. The token's index among the tokens of that rank, its local index, is
(p // (W * I)) * I + p % I. In a paged cache a block id covers block_size tokens on each rank: block_size * W positions.

Functions take Python ints or integer tensors (any shape, any device) and return the same kind; all but `slot_mapping`
take NumPy arrays, too. `local_seq_lens` without a rank always returns a tensor. Nothing here depends on
torch.distributed.
"""

from collections.abc import Sequence
from typing import TypeVar, overload

import numpy as np
import torch
from torch import Tensor

# Deterministic attention sums over tiles of TILE positions; tile i is of class i % NUM_CLASSES. With an interleave of
# TILE a rank of W stores whole classes, those whose remainder by W is its own number.
TILE, NUM_CLASSES = 64, 8
Integers = TypeVar("Integers", int, Tensor, np.ndarray)


def owner_rank(position: Integers, dcp_size: int, interleave: int = 1) -> Integers:
    """Return the DCP rank that stores the token at a position of its sequence.

    Args:
        position: 0-based position in the sequence.
    Returns:
        Rank in [0, dcp_size).
    Raises:
        ValueError: dcp_size or interleave is below 1, or an int position is negative.
    """
    _check_layout(dcp_size, interleave)
    _check_non_negative("position", position)
    return position // interleave % dcp_size


def local_index(position: Integers, dcp_size: int, interleave: int = 1) -> Integers:
    """Return the token's index among the tokens of its rank; arguments and errors as in `owner_rank`."""
    _check_layout(dcp_size, interleave)
    _check_non_negative("position", position)
    return position // (dcp_size * interleave) * interleave + position % interleave


def global_position(index: Integers, dcp_rank: int, dcp_size: int, interleave: int = 1) -> Integers:
    """Return the position of the token with a local index on a rank, the inverse of `owner_rank` and `local_index`.

    Raises:
        ValueError: dcp_size or interleave is below 1, dcp_rank is outside [0, dcp_size), or an int index is negative.
    """
    _check_layout(dcp_size, interleave, dcp_rank)
    _check_non_negative("index", index)
    return index // interleave * (dcp_size * interleave) + dcp_rank * interleave + index % interleave


@overload
def local_seq_lens(seq_lens: int, dcp_size: int, dcp_rank: int, interleave: int = 1) -> int: ...
@overload
def local_seq_lens(seq_lens: np.ndarray, dcp_size: int, dcp_rank: int, interleave: int = 1) -> np.ndarray: ...
@overload
def local_seq_lens(seq_lens: int | Tensor, dcp_size: int, dcp_rank: None = None, interleave: int = 1) -> Tensor: ...
@overload
def local_seq_lens(seq_lens: Tensor, dcp_size: int, dcp_rank: int | None = None, interleave: int = 1) -> Tensor: ...
def local_seq_lens(
    seq_lens: int | Tensor | np.ndarray, dcp_size: int, dcp_rank: int | None = None, interleave: int = 1
) -> int | Tensor | np.ndarray:
    """Count the tokens of each sequence that a rank stores.

    Args:
        seq_lens: Lengths of whole sequences, any shape.
        dcp_rank: Rank in the DCP group; None for all ranks.
    Returns:
        Without dcp_rank, an int32 tensor [*shape of seq_lens, dcp_size]. With dcp_rank, the kind and
        shape of seq_lens: an int, or an int32 array or tensor.
    Raises:
        ValueError: dcp_size or interleave is below 1, dcp_rank is outside [0, dcp_size), or an int length is negative.
    """
    _check_layout(dcp_size, interleave, dcp_rank)
    _check_non_negative("seq_lens", seq_lens)
    if isinstance(seq_lens, np.ndarray) and dcp_rank is not None:
        past_first = seq_lens % (dcp_size * interleave) - dcp_rank * interleave
        mine = np.minimum(np.maximum(past_first, 0), interleave)  # ndarray.clip takes ten times as long
        return (seq_lens // (dcp_size * interleave) * interleave + mine).astype(np.int32)
    whole = seq_lens // (dcp_size * interleave) * interleave
    rest = seq_lens % (dcp_size * interleave)
    if isinstance(seq_lens, int) and dcp_rank is not None:
        return whole + min(max(rest - dcp_rank * interleave, 0), interleave)
    whole, rest = torch.as_tensor(whole), torch.as_tensor(rest)
    if dcp_rank is None:
        first = torch.arange(dcp_size, device=rest.device) * interleave
        return (whole[..., None] + (rest[..., None] - first).clamp(0, interleave)).to(torch.int32)
    return (whole + (rest - dcp_rank * interleave).clamp(0, interleave)).to(torch.int32)


@overload
def slot_mapping(
    positions: int,
    block_table_rows: Sequence[int] | Tensor,
    block_size: int,
    dcp_size: int,
    dcp_rank: int,
    interleave: int = 1,
) -> int: ...
@overload
def slot_mapping(
    positions: Tensor, block_table_rows: Tensor, block_size: int, dcp_size: int, dcp_rank: int, interleave: int = 1
) -> Tensor: ...
def slot_mapping(
    positions: int | Tensor,
    block_table_rows: Sequence[int] | Tensor,
    block_size: int,
    dcp_size: int,
    dcp_rank: int,
    interleave: int = 1,
) -> int | Tensor:
    """Map tokens to cache slots (block id x block_size + offset) on this rank, -1 where another rank owns the token.

    DeepSeek-V4's compressor calls it on the device; `StepBuilder.slots` maps a whole step in NumPy, on the host.

    Args:
        positions: Positions [T] of tokens in their sequences; a negative position (padding) gets -1.
        block_table_rows: Block ids [T, max_blocks] of each token's sequence, or [max_blocks] if all tokens belong to
            one sequence.
        block_size: Tokens of a block on one rank.
    Returns:
        [T] int64; an int for an int position.
    Raises:
        ValueError: A size is below 1, dcp_rank is outside [0, dcp_size), or interleave does not divide block_size.
    """
    _check_layout(dcp_size, interleave, dcp_rank)
    check_block_size(block_size, interleave)
    if isinstance(positions, int):
        table = torch.as_tensor(block_table_rows)
        return int(slot_mapping(torch.tensor([positions]), table, block_size, dcp_size, dcp_rank, interleave))
    rows = torch.as_tensor(block_table_rows, device=positions.device).to(torch.int64).expand(positions.shape[0], -1)
    mine = (positions >= 0) & (owner_rank(positions, dcp_size, interleave) == dcp_rank)
    index = local_index(positions, dcp_size, interleave).where(mine, 0)
    blocks = rows.gather(1, (index // block_size)[:, None])[:, 0]
    return (blocks * block_size + index % block_size).where(mine, -1)


def window_bound(window: int, dcp_size: int, interleave: int) -> int:
    """Return an upper bound on the tokens that one rank owns of `window` consecutive positions (DeepSeek-V4)."""
    return min(window, (window // (dcp_size * interleave) + 2) * interleave)


def check_block_size(block_size: int, interleave: int) -> None:
    """Raise ValueError if block_size is below 1, or interleave does not divide it."""
    if block_size < 1:
        raise ValueError(f"block_size (--block-size) is {block_size}; it must be at least 1")
    if block_size % interleave:  # a block would end between consecutive tokens of a rank
        raise ValueError(
            f"cp_kv_cache_interleave_size (--cp-kv-cache-interleave-size) is {interleave}; "
            f"it must divide block_size (--block-size) {block_size}"
        )


def _check_layout(dcp_size: int, interleave: int, dcp_rank: int | None = None) -> None:
    if dcp_size < 1:
        raise ValueError(f"dcp_size is {dcp_size}; it must be at least 1")
    if interleave < 1:
        raise ValueError(f"interleave (--cp-kv-cache-interleave-size) is {interleave}; it must be at least 1")
    if dcp_rank is not None and not 0 <= dcp_rank < dcp_size:
        raise ValueError(f"dcp_rank is {dcp_rank}; with dcp_size {dcp_size} it must be in [0, {dcp_size})")


def _check_non_negative(name: str, value: int | Tensor | np.ndarray) -> None:
    # Tensors are not checked: that would synchronize with the GPU.
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{name} is {value}; it must not be negative")
