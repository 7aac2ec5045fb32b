"""Stream compaction inside Triton programs: the kept elements of a tile are stored side by side, in order.

Their indices come from prefix sums, so the result is the same in every run.
"""

import triton
import triton.language as tl

_FILLED = tl.constexpr(1024)  # elements per store
_STORE_8_BYTES = tl.constexpr(
    "{ .reg .pred p; .reg .b64 a; setp.ge.f32 p, $4, $5; mad.wide.s32 a, $2, 8, $1; "
    "@p st.global.b64 [a], $3; mov.b32 $0, 0; }"
)
_STORE_4_BYTES = tl.constexpr(
    "{ .reg .pred p; .reg .b64 a; setp.ge.f32 p, $4, $5; mad.wide.s32 a, $2, 4, $1; "
    "@p st.global.b32 [a], $3; mov.b32 $0, 0; }"
)


@triton.jit
def _kept_indices(is_kept):
    """Return the index of each kept element among the kept ones, in order, and how many there are.

    The counts of four loads are scanned as the bytes of one integer, since a warp has at most 128 elements of a load.
    """
    LOADS: tl.constexpr = is_kept.shape[0]
    WARPS: tl.constexpr = is_kept.shape[1]
    LANES: tl.constexpr = is_kept.shape[2]
    PACKED: tl.constexpr = min(LOADS, 4)
    kept = is_kept.to(tl.int32)
    of_thread = tl.sum(kept, 3)
    shift = (8 * tl.arange(0, PACKED))[None, :, None, None]
    packed = tl.sum(tl.reshape(of_thread, [LOADS // PACKED, PACKED, WARPS, LANES]) << shift, 1)
    up_to_thread = tl.reshape((tl.cumsum(packed, 2)[:, None, :, :] >> shift) & 255, [LOADS, WARPS, LANES])
    of_warp = tl.reshape((tl.sum(packed, 2)[:, None, :] >> tl.reshape(shift, [1, PACKED, 1])) & 255, [LOADS * WARPS])
    before_warp = tl.reshape(tl.cumsum(of_warp, 0) - of_warp, [LOADS, WARPS])
    before_thread = before_warp[:, :, None] + up_to_thread - of_thread
    return before_thread[:, :, :, None] + tl.cumsum(kept, 3) - kept, tl.sum(of_warp)


@triton.jit
def scatter(out_ptr, indices, values, keys, bound):
    """Store values at indices from the registers that hold them.

    Triton's store uses another layout than its loads: the tile would go through shared memory.
    """
    wide: tl.constexpr = values.dtype == tl.int64
    tl.inline_asm_elementwise(
        _STORE_8_BYTES if wide else _STORE_4_BYTES,
        "=r,l,r,l,f,f" if wide else "=r,l,r,r,f,f",
        [out_ptr.to(tl.int64, bitcast=True), indices, values, keys, bound],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def compact(out_ptr, values, keys, bound):
    """Store the values [loads, warps, lanes, width], of 4 or 8 bytes, whose keys reach the bound; return how many."""
    indices, num_kept = _kept_indices(keys >= bound)
    scatter(out_ptr, indices, values, keys, bound)
    return num_kept


@triton.jit
def fill(out_ptr, value, first, end):
    """Fill out[first:end] with a value."""
    for at in range(first, end, _FILLED):
        index = at + tl.arange(0, _FILLED)
        tl.store(out_ptr + index, tl.full([_FILLED], value, out_ptr.dtype.element_ty), mask=index < end)
