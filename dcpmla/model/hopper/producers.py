"""The producers of a grouped product: they copy rows and weights into shared memory, stage after stage.

`gather_rows` is four warps that copy rows of tokens by cp.async. TMA loads weights: `load_weights` is one warp. For
4-bit weights `dequantize_weights` is four warps a part; they do not copy rows because their fences would wait for the
copies.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dcpmla.attention.hopper.compat import barrier, copy_async, reinterpret, tma_load
from dcpmla.attention.hopper.stage_ring import allocate_mbarriers, await_free, ready_at
from dcpmla.model.hopper.pipeline import (
    COLUMNS,
    NUM_STAGES,
    ROW_BYTES,
    ROWS,
    find_tile,
    find_weights,
    num_tiles,
    num_weight_rows,
)
from dcpmla.parallel import formats

GROUP = gl.constexpr(formats.GROUP)  # values of 4 bits that have one scale
NUM_SLOTS = gl.constexpr(4)  # steps of packed codes in shared memory


@gluon.jit
def gather_rows(x_ptr, x_scales_ptr, x_scales_stride_row, x_scales_stride_block, buffers, routes):
    """Fill stages with the rows of a block's tokens; where it has fewer routes, and past the depth, with zeros."""
    size: gl.constexpr = buffers.x.dtype.primitive_bitwidth // 8
    depth: gl.constexpr = buffers.x.shape[2]
    num_steps: gl.constexpr = (routes.depth + depth - 1) // depth
    layout: gl.constexpr = gl.BlockedLayout([1, 16 // size], [4, 8], [4, 1], [1, 0])  # 16 bytes a thread
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.expand_dims(gl.arange(0, depth, layout=gl.SliceLayout(0, layout)), 0)
    num_filled = 0
    for number in range(gl.program_id(0), num_tiles(routes), gl.num_programs(0)):
        tile = find_tile(number, routes)
        routes_ptr = routes.routes_ptr + tile.block * (2 * ROWS)
        upper, lower = gl.load(routes_ptr + row), gl.load(routes_ptr + ROWS + row)
        if x_scales_ptr is not None:
            both = gl.load(routes_ptr + gl.arange(0, 2 * ROWS, layout=flat))
            scales_at = x_scales_ptr + both // routes.top_k * x_scales_stride_row
        for step in range(num_steps):
            stage = await_free(buffers.ring, num_filled)
            at = step * depth + column
            for group in gl.static_range(2):
                route = upper if group == 0 else lower
                rows_at = x_ptr + gl.expand_dims((route // routes.top_k).to(gl.int64) * routes.depth, 1) + at
                mask = gl.expand_dims(route >= 0, 1) & (at < routes.depth)
                copy_async(buffers.x.index(2 * stage + group), rows_at, mask=mask)
            if x_scales_ptr is not None:
                scales = buffers.x_scales.index(stage)
                copy_async(scales, scales_at + step * x_scales_stride_block, mask=both >= 0)
            # Arrives once the copies have landed.
            async_copy.mbarrier_arrive(ready_at(buffers.ring, num_filled), increment_count=False)
            num_filled += 1


@gluon.jit
def load_weights(w_desc, buffers, routes):
    """Fill stages with both parts of the weights."""
    depth: gl.constexpr = buffers.w.shape[2]
    num_steps: gl.constexpr = (routes.depth + depth - 1) // depth
    num_filled = 0
    for number in range(gl.program_id(0), num_tiles(routes), gl.num_programs(0)):
        tile = find_tile(number, routes)
        for step in range(num_steps):
            stage, ready = await_free(buffers.ring, num_filled), ready_at(buffers.ring, num_filled)
            mbarrier.expect(ready, 2 * COLUMNS * ROW_BYTES)
            for part in gl.static_range(2):
                at = [find_weights(tile, part, routes), step * depth]
                tma_load(w_desc, at, ready, buffers.w.index(stage).slice(part * COLUMNS, COLUMNS))
            num_filled += 1


def _assembler(convert: str) -> gl.constexpr:
    """Return code that makes four times two bfloat16, $0 to $3, of the eight codes of a word, $4, their scale, $5, and
    their zero point, $6.

    `convert` makes two of them, from the codes at bits 4 i and 16 + 4 i, in `word`; {0} {1} shifts them up to bit 6 of
    each half, {2} {3} their signs to bit 15, {4} {5} moves them down to bit 0.
    """
    lines = [".reg .b32 word, part;"]
    for i in range(4):
        shifts = (("shl.b32", bits) if bits >= 0 else ("shr.b32", -bits) for bits in (6 - 4 * i, 12 - 4 * i, -4 * i))
        lines += [convert.format(*(word for shift in shifts for word in shift)), f"mul.rn.bf16x2 ${i}, word, $5;"]
    return gl.constexpr("{" + "\n".join(lines) + "}")


# A code's three lower bits, as the last of bfloat16's exponent and the first of its mantissa, are its size times
# 2^-126.
_FP4 = _assembler("""
    {0} part, $4, {1}; and.b32 part, part, 0x01C001C0;
    {2} word, $4, {3}; lop3.b32 word, word, 0x80008000, part, 0xEA;
    mov.b32 part, 0x7E807E80; mul.rn.bf16x2 word, word, part;
""")
# A code, as the last bits of the mantissa of 128, is 128 and its zero point too large: 136 without zero points.
_INT4 = _assembler("""
    {4} word, $4, {5}; lop3.b32 word, word, 0x000F000F, 0x43004300, 0xEA;
    mov.b32 part, 0x43084308; sub.rn.bf16x2 word, word, part;
""")


_ZEROED = _assembler("""
    {4} word, $4, {5}; lop3.b32 word, word, 0x000F000F, 0x43004300, 0xEA; sub.rn.bf16x2 word, word, $6;
""")


@gluon.jit
def _dequantize(words, scales, zeros, second: gl.constexpr):
    """Return a group's values, two bfloat16 a word [COLUMNS, 16], of its codes, int32 [COLUMNS, 4]. Each eight columns
    are in the order 0, 4, 1, 5, 2, 6, 3, 7.

    scales: [COLUMNS], two groups' scales in each number: e8m0 as uint16, or bfloat16 as int32; or one of both groups.
    zeros: Zero points of both groups, uint8; other numbers if there are none.
    """
    if scales.dtype == gl.uint16:
        exponent = (scales >> 8 if second else scales & 0xFF).to(gl.int32) << 7
        exponent = gl.where(exponent == 0, 1 << 6, exponent)  # 2^-127
        factors = exponent | exponent << 16
    elif scales.dtype == gl.int32:
        factors = (scales >> 16 & 0xFFFF) | (scales >> 16 << 16) if second else (scales & 0xFFFF) | scales << 16
    else:
        bits = scales.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32)
        factors = (bits & 0xFFFF) | bits << 16
    factors = gl.expand_dims(factors, 1).broadcast_to(words.shape)
    values = [words, factors]
    if zeros.dtype == gl.uint8:
        offsets = zeros.to(gl.int32) * 0x10001 | 0x43004300
        values = [words, factors, gl.expand_dims(offsets, 1).broadcast_to(words.shape)]
    asm: gl.constexpr = _FP4 if scales.dtype == gl.uint16 else _ZEROED if zeros.dtype == gl.uint8 else _INT4
    constraints: gl.constexpr = "=&r,=&r,=&r,=&r,r,r,r" if zeros.dtype == gl.uint8 else "=&r,=&r,=&r,=&r,r,r"
    a, b, c, d = gl.inline_asm_elementwise(
        asm, constraints, values, (gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(gl.join(a, c), gl.join(b, d)).reshape([COLUMNS, GROUP // 2])


@gluon.jit
def allocate_codes(w_desc):
    """Allocate slots for packed codes of a part, and mbarriers that signal their arrival."""
    codes = gl.allocate_shared_memory(gl.int32, [NUM_SLOTS, COLUMNS, GROUP // 4], w_desc.layout)
    return codes, allocate_mbarriers(NUM_SLOTS, 1)


@gluon.jit
def _load_codes(w_desc, row, step, codes, codes_ready, num_loaded):
    """Ask for the codes of a step."""
    slot = num_loaded % NUM_SLOTS
    mbarrier.expect(codes_ready.index(slot), COLUMNS * GROUP)
    tma_load(w_desc, [row, step * (GROUP // 4)], codes_ready.index(slot), codes.index(slot))


@gluon.jit
def _load_scales(scales_at, zeros_at, step, num_steps: gl.constexpr, SCALE_STEPS: gl.constexpr):
    """Return a step's scales and zero points; its scales again without zero points."""
    at = gl.minimum(step, num_steps - 1) // SCALE_STEPS
    scales = gl.load(scales_at + at)
    zeros = scales
    if zeros_at is not None:
        zeros = gl.load(zeros_at + at)
    return scales, zeros


@gluon.jit
def dequantize_weights(part: gl.constexpr, w_desc, scales_ptr, zeros_ptr, codes, codes_ready, buffers, routes):
    """Fill stages with a part of the weights in 16 bits, two groups of each row a step."""
    num_steps: gl.constexpr = routes.depth // buffers.w.shape[2]
    num_words: gl.constexpr = GROUP // 8
    by_row: gl.constexpr = gl.BlockedLayout([1, num_words], [32, 1], [4, 1], [1, 0])  # a thread has a row
    word_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    words = reinterpret(buffers.w, gl.int32, [2 * NUM_STAGES, COLUMNS, GROUP], word_layout)
    num_filled = 0
    for number in range(gl.program_id(0), num_tiles(routes), gl.num_programs(0)):
        tile = find_tile(number, routes)
        first_row = find_weights(tile, part, routes)
        row = first_row + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, by_row))
        # The second part of a block's last tile may exceed the weights; its result is not stored.
        first_scale = gl.minimum(row, num_weight_rows(routes) - 1).to(gl.int64) * (num_steps // routes.scale_steps)
        scales_at, zeros_at = scales_ptr + first_scale, None
        if zeros_ptr is not None:
            zeros_at = zeros_ptr + first_scale
        for step in gl.static_range(NUM_SLOTS):
            if step < num_steps:
                _load_codes(w_desc, first_row, step, codes, codes_ready, num_filled + step)
        scales, zeros = _load_scales(scales_at, zeros_at, 0, num_steps, routes.scale_steps)
        next_scales, next_zeros = _load_scales(scales_at, zeros_at, 1, num_steps, routes.scale_steps)
        for step in range(num_steps):
            slot = num_filled % NUM_SLOTS
            mbarrier.wait(codes_ready.index(slot), (num_filled // NUM_SLOTS) & 1)
            stage = await_free(buffers.ring, num_filled)
            packed, w = codes.index(slot), words.index(2 * stage + part)
            for group in gl.static_range(2):
                group_words = packed.slice(group * num_words, num_words, dim=1).load(by_row)
                values = _dequantize(group_words, scales, zeros, group == 1)
                w.slice(group * (GROUP // 2), GROUP // 2, dim=1).store(values)
            fence_async_shared()
            barrier()
            mbarrier.arrive(ready_at(buffers.ring, num_filled), count=1)
            # The slot has been read, and a fence has just passed, which would wait for loads.
            if step + NUM_SLOTS < num_steps:
                _load_codes(w_desc, first_row, step + NUM_SLOTS, codes, codes_ready, num_filled + NUM_SLOTS)
            scales, zeros = next_scales, next_zeros
            next_scales, next_zeros = _load_scales(scales_at, zeros_at, step + 2, num_steps, routes.scale_steps)
            num_filled += 1
