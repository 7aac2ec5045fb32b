"""The kernel that draws tokens, with its launcher; `runtime/sampling.py` specifies it.

Several programs share a row, whose tiles are dealt to them in turn, and synchronize when one needs the counts of all.
A cooperative launch guarantees that they all run at the same time. Counts are whole numbers, so no sum depends on the
order of the programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # tokens
_WARPS = 8
_PROGRAMS_PER_PROCESSOR = 2  # resident at the same time, with _REGISTERS
_REGISTERS = 128
_CHUNK = tl.constexpr(128)  # tokens whose masses are summed up
_BINS = tl.constexpr((1 << 11) + (1 << 11) + (1 << 10))  # sums of a search, one for each value of a rank's three digits
_MEETINGS = tl.constexpr(8)
_SCRATCH = tl.constexpr(2 * _BINS.value + 1 + _MEETINGS.value)  # numbers per row: both searches, its mass, meetings
_LAST_RANK = tl.constexpr(0xFFFFFFFF)
_ONE = tl.constexpr(17592186044416.0)  # 2^44, the mass of the best token


@triton.jit
def _flip(bits):
    """Map the bits of a float32 to its rank's bits as uint32, 0 for the greatest number, and back."""
    return bits ^ (~(bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _rank(logits):
    return _flip((logits + 0.0).to(tl.int32, bitcast=True)).to(tl.uint32, bitcast=True)  # the zeros are equal


@triton.jit
def _mass(logits, best, temperature):
    """Return 2^44 exp((logits - best) / temperature) as int64, 0 for NaN."""
    odds = tl.exp((logits.to(tl.float64) - best) / temperature)
    return (tl.where(odds > 0, odds, 0.0) * _ONE).to(tl.int64)


@triton.jit
def _meet(arrived_ptr):
    """Wait until all programs of the row have arrived; their earlier writes are visible afterwards."""
    tl.debug_barrier()
    num_arrived = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") + 1
    while num_arrived < tl.num_programs(1):
        num_arrived = tl.atomic_add(arrived_ptr, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def _find_digit(
    logits_ptr,
    weights_ptr,
    wanted,
    negligible,
    last,
    before,
    sums_ptr,
    arrived_ptr,
    vocab,
    TILE: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
):
    """Add the next digit to the last rank, and the weights of the ranks that are lower by it to the sum before."""
    for first in range(tl.program_id(1) * TILE, vocab, tl.num_programs(1) * TILE):
        token = first + tl.arange(0, TILE)
        is_counted = token < vocab
        rank = _rank(tl.load(logits_ptr + token, mask=is_counted, other=0.0))
        if SHIFT + BITS < 32:
            is_counted &= (rank >> (SHIFT + BITS)) == (last >> (SHIFT + BITS))
        weight = tl.full([TILE], 1, tl.int64)
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + token, mask=is_counted, other=0)
            is_counted &= weight > negligible
        digit = ((rank >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
        tl.atomic_add(sums_ptr + digit, weight, mask=is_counted, sem="relaxed")
    _meet(arrived_ptr)
    sums = tl.load(sums_ptr + tl.arange(0, 1 << BITS))
    is_lower = tl.cumsum(sums, 0) < wanted - before
    last |= tl.sum(is_lower.to(tl.int32)).to(tl.uint32) << SHIFT
    return last, before + tl.sum(tl.where(is_lower, sums, 0))


@triton.jit
def _find_last(logits_ptr, weights_ptr, wanted, negligible, sums_ptr, arrived_ptr, vocab, TILE: tl.constexpr):
    """Return the rank at which the weights (1 without a pointer) of the lowest ranks reach a sum, and their sum before
    it. Weights up to `negligible` are left out: the others reach the sum.
    """
    last, before = tl.cast(0, tl.uint32), tl.cast(0, tl.int64)
    last, before = _find_digit(
        logits_ptr, weights_ptr, wanted, negligible, last, before, sums_ptr, arrived_ptr, vocab, TILE, 21, 11
    )
    last, before = _find_digit(
        logits_ptr, weights_ptr, wanted, negligible, last, before, sums_ptr + 2048, arrived_ptr + 1, vocab, TILE, 10, 11
    )
    return _find_digit(
        logits_ptr, weights_ptr, wanted, negligible, last, before, sums_ptr + 4096, arrived_ptr + 2, vocab, TILE, 0, 10
    )


@triton.jit
def draw_kernel(
    tokens_ptr,
    logits_ptr,
    rows_ptr,
    numbers_ptr,
    top_k_ptr,
    masses_ptr,
    chunks_ptr,
    scratch_ptr,
    vocab,
    logits_stride,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Replace the best token of some rows by one that is drawn; programs (r, i) share row rows[r].

    Args:
        numbers_ptr: [n, 3] float64, see `draw`.
        masses_ptr, chunks_ptr: [n, vocab] and [n, 2, CHUNKS] int64, which may hold anything.
        scratch_ptr: [n, _SCRATCH] int64, zeros.
    """
    row = tl.program_id(0).to(tl.int64)
    tokens_ptr += tl.load(rows_ptr + row)
    logits_ptr += tl.load(rows_ptr + row) * logits_stride
    masses_ptr += row * vocab
    chunks_ptr += row * 2 * CHUNKS
    sums_ptr = scratch_ptr + row * _SCRATCH
    total_ptr = sums_ptr + 2 * _BINS
    arrived_ptr = total_ptr + 1
    best = tl.load(logits_ptr + tl.load(tokens_ptr)).to(tl.float64)
    temperature, top_p = tl.load(numbers_ptr + row * 3), tl.load(numbers_ptr + row * 3 + 1)
    top_k = tl.load(top_k_ptr + row)

    worst, last, before = tl.cast(_LAST_RANK, tl.uint32), tl.cast(_LAST_RANK, tl.uint32), tl.cast(0, tl.int64)
    if top_k > 0:
        worst, before = _find_last(logits_ptr, None, top_k, 0, sums_ptr, arrived_ptr, vocab, TILE)
    kept = tl.zeros([TILE], tl.int64)
    for first in range(tl.program_id(1) * TILE, vocab, tl.num_programs(1) * TILE):
        token = first + tl.arange(0, TILE)
        logits = tl.load(logits_ptr + token, mask=token < vocab, other=-float("inf"))
        mass = tl.where(_rank(logits) <= worst, _mass(logits, best, temperature), 0)
        tl.store(masses_ptr + token, mass, mask=token < vocab)
        kept += mass
    tl.atomic_add(total_ptr, tl.sum(kept), sem="relaxed")
    _meet(arrived_ptr + 3)

    mass_of_tie, num_ties = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    if top_p < 1:
        total = tl.load(total_ptr)
        wanted = tl.minimum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), total)
        negligible = (total - wanted) // vocab  # all tokens with such masses together are not needed
        last, before = _find_last(
            logits_ptr, masses_ptr, wanted, negligible, sums_ptr + _BINS, arrived_ptr + 4, vocab, TILE
        )
        mass_of_tie = _mass(_flip(last.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True), best, temperature)
        num_ties = tl.cdiv(wanted - before, tl.maximum(mass_of_tie, 1))

    for first in range(tl.program_id(1) * TILE, vocab, tl.num_programs(1) * TILE):
        better, is_tied = _load_masses(logits_ptr, masses_ptr, first, last, vocab, TILE // _CHUNK)
        at = chunks_ptr + first // _CHUNK + tl.arange(0, TILE // _CHUNK)
        tl.store(at, tl.sum(better, 1))
        tl.store(at + CHUNKS, tl.sum(is_tied.to(tl.int64), 1))
    _meet(arrived_ptr + 7)
    if tl.program_id(1) == 0:
        chunk = tl.arange(0, CHUNKS)
        masses = tl.load(chunks_ptr + chunk, mask=chunk * _CHUNK < vocab, other=0)
        ties = tl.load(chunks_ptr + CHUNKS + chunk, mask=chunk * _CHUNK < vocab, other=0)
        cumulative = tl.cumsum(masses, 0) + tl.minimum(tl.cumsum(ties, 0), num_ties) * mass_of_tie
        total = tl.max(cumulative)
        number = (tl.load(numbers_ptr + row * 3 + 2) * total.to(tl.float64)).to(tl.int64)
        number = tl.minimum(number, total - 1)
        is_before = cumulative <= number
        first = tl.sum(is_before.to(tl.int32)) * _CHUNK
        mass_before, ties_before = tl.sum(tl.where(is_before, masses, 0)), tl.sum(tl.where(is_before, ties, 0))
        better, is_tied = _load_masses(logits_ptr, masses_ptr, first, last, vocab, 1)
        masses_to = mass_before + tl.cumsum(tl.sum(better, 0), 0)
        ties_to = ties_before + tl.cumsum(tl.sum(is_tied.to(tl.int64), 0), 0)
        cumulative = masses_to + tl.minimum(ties_to, num_ties) * mass_of_tie
        tl.store(tokens_ptr, (first + tl.sum((cumulative <= number).to(tl.int32))).to(tl.int64))


@triton.jit
def _load_masses(logits_ptr, masses_ptr, first, last, vocab, CHUNKS: tl.constexpr):
    """Return the masses of tokens from `first` on, 0 from the last rank on, and which have that: [CHUNKS, _CHUNK]."""
    token = first + tl.arange(0, CHUNKS)[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :]
    is_token = token < vocab
    rank = _rank(tl.load(logits_ptr + token, mask=is_token, other=0.0))
    return tl.load(masses_ptr + token, mask=is_token & (rank < last), other=0), is_token & (rank == last)


def draw(logits: Tensor, tokens: Tensor, rows: Tensor, numbers: Tensor, top_k: Tensor, tile: int = _TILE) -> None:
    """Replace the best token of some rows by one that `runtime.draws.draw_tokens` would draw, in one kernel.

    Args:
        logits: [N, vocab] float32, contiguous rows; at most 2^18 tokens.
        tokens: [N] int64, the greatest logits; changed in place.
        rows: [n] int64, at most 64.
        numbers: [n, 3] float64: temperature, top_p, the number in [0, 1).
        top_k: [n] int64, at most vocab.
        tile: Number of tokens that a program reads at a time.
    """
    num_rows, vocab, device = len(rows), logits.shape[1], logits.device
    assert logits.stride(1) == 1
    num_tiles = triton.cdiv(vocab, tile)
    splits = min(num_tiles, max(1, _PROGRAMS_PER_PROCESSOR * _num_processors(device) // num_rows))
    num_chunks = triton.next_power_of_2(num_tiles * tile // _CHUNK.value)
    draw_kernel[(num_rows, splits)](
        tokens,
        logits,
        rows,
        numbers,
        top_k,
        torch.empty(num_rows, vocab, dtype=torch.int64, device=device),
        torch.empty(num_rows, 2, num_chunks, dtype=torch.int64, device=device),
        torch.zeros(num_rows, _SCRATCH.value, dtype=torch.int64, device=device),
        vocab,
        logits.stride(0),
        CHUNKS=num_chunks,
        TILE=tile,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        **({"launch_cooperative_grid": True} if splits > 1 else {}),
    )


def _num_processors(device: torch.device) -> int:
    """Return the GPU's multiprocessors; of Triton's interpreter, which runs one program after the other, 0."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 0
