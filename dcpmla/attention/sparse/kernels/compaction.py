"""Storing what is kept of a tile side by side, in its order: places come from prefix sums, so that they are the same each time."""

import triton
import triton.language as tl

_FILLED = tl.constexpr(1024)  # elements that are filled at a time
_STORE_8_BYTES = tl.constexpr("{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b64 [$1], $2; mov.b32 $0, 0; }")
_STORE_4_BYTES = tl.constexpr("{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }")


@triton.jit
def _places(is_kept, GROUP: tl.constexpr):
    """Where each that is kept belongs so that they lie side by side, in their order."""
    TILE: tl.constexpr = is_kept.shape[0]
    kept = tl.reshape(is_kept.to(tl.int32), [TILE // GROUP, GROUP])
    of_group = tl.sum(kept, 1)
    places = (tl.cumsum(of_group, 0) - of_group)[:, None] + tl.cumsum(kept, 1) - kept
    return tl.reshape(places, [TILE])


@triton.jit
def scatter(pointers, values, is_stored):
    """A store from where the operands are: Triton's has another layout than its loads, and tiles would go through shared memory."""
    wide: tl.constexpr = values.dtype == tl.int64
    tl.inline_asm_elementwise(
        _STORE_8_BYTES if wide else _STORE_4_BYTES,
        "=r,l,l,r" if wide else "=r,l,r,r",
        [pointers.to(tl.int64, bitcast=True), values, is_stored.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def compact(values, is_kept, out_ptr, GROUP: tl.constexpr):
    """The values [N] of 4 or 8 bytes that are kept -> the head of out. GROUP: how many of them a warp loads at a time."""
    scatter(out_ptr + _places(is_kept, GROUP), values, is_kept)


@triton.jit
def fill(out_ptr, value, first, end):
    """out[first:end] = value."""
    for at in range(first, end, _FILLED):
        index = at + tl.arange(0, _FILLED)
        tl.store(out_ptr + index, tl.full([_FILLED], value, out_ptr.dtype.element_ty), mask=index < end)
