"""Grouped products of many rows an expert on Hopper GPUs, in 16 or 8 bits; `grouped` has those of few rows.

A program computes one tile after the other: 128 routes of an expert by two parts of 128 of its weight's rows, gates and
what they gate, or neighbours. Four warps, the producer, gather the rows of x by cp.async and ask TMA for the weights;
two groups of four warps, the consumers, multiply 64 routes each. While one of them scales a product in fp8, or stores
its results, the tensor cores work for the other, and the producer is stages ahead.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dcpmla.attention.hopper.compat import aggregate, barrier, copy_async, tma_load
from dcpmla.attention.hopper.pipeline import allocate_mbarriers, stage_of
from dcpmla.cache.formats import FP8
from dcpmla.model.kernels import grouped, packed
from dcpmla.parallel.fp8 import QuantizedRows
from dcpmla.parallel.kernels import quantize
from dcpmla.parallel.quantized import GROUP as _GROUP

FP4, INT4 = packed._FP4, packed._INT4
swiglu = gluon.jit(grouped.swiglu.fn)
divide = gluon.jit(quantize.divide.fn)
group_scale = gluon.jit(quantize.group_scale.fn)
to_fp8 = gluon.jit(quantize.to_fp8.fn)

BLOCK_ROWS = 128  # routes of a block
ROWS = gl.constexpr(64)  # of a consumer
COLUMNS = gl.constexpr(128)  # rows of the weight in a part; a scale's block, and a group of the result in fp8
ROW_BYTES = gl.constexpr(128)  # of a stage: the width of a swizzle
NUM_STAGES = gl.constexpr(3)
NUM_CODES = gl.constexpr(4)  # steps of packed codes

PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
PRODUCT_FP8 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
GROUP = gl.constexpr(_GROUP)
SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

_GLUON = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@aggregate
class Buffers:
    """Stages in shared memory, and mbarriers: a stage has been filled, and is free again."""

    x: gl.shared_memory_descriptor  # [2 stages, ROWS, DEPTH], a consumer's rows after the other's
    w: gl.shared_memory_descriptor  # [2 stages, COLUMNS, DEPTH], one part after the other
    x_scales: gl.base_value  # float32 [2 stages, ROWS]; None in 16 bits
    out: gl.shared_memory_descriptor  # [2, ROWS, COLUMNS], results on their way
    ready: gl.shared_memory_descriptor  # [stages]
    free: gl.shared_memory_descriptor


@aggregate
class Routes:
    """Which rows are multiplied by which weights."""

    experts_ptr: gl.tensor  # int32, of each block
    routes_ptr: gl.tensor  # int32 [blocks, BLOCK_ROWS], -1 for none
    num_tiles: gl.tensor  # of all blocks
    num_experts: gl.tensor
    top_k: gl.constexpr  # row route // top_k of x is a route's
    width: gl.constexpr  # rows of an expert's weight in a part
    depth: gl.constexpr  # columns of the weight
    is_gated: gl.constexpr


@aggregate
class Tile:
    """A tile of the result."""

    block: gl.tensor
    expert: gl.tensor
    first_column: gl.tensor  # of the first part
    is_mine: gl.tensor  # the expert is one of this rank's


@gluon.jit
def _find_tile(tile, routes):
    """Return a `Tile` by its number: a block's are neighbours, so that programs of one time share rows in the L2."""
    columns: gl.constexpr = COLUMNS if routes.is_gated else 2 * COLUMNS
    tiles_of_block: gl.constexpr = (routes.width + columns - 1) // columns
    block = tile // tiles_of_block
    expert = gl.load(routes.experts_ptr + block)
    is_mine = (expert >= 0) & (expert < routes.num_experts)
    return Tile(block, expert, tile % tiles_of_block * columns, is_mine)


@gluon.jit
def _copy_rows(x_ptr, route, column, is_column, buffer, routes):
    """Start copies of columns of the rows of x that routes have; where a block has fewer, and past the last column, zeros."""
    row = (route // routes.top_k).to(gl.int64)
    mask = gl.expand_dims(route >= 0, 1) & is_column
    copy_async(buffer, x_ptr + gl.expand_dims(row * routes.depth, 1) + column, mask=mask)


@gluon.jit
def _produce(x_ptr, x_scales_ptr, x_scales_stride_row, x_scales_stride_block, w_desc, buffers, routes):
    """Fill stages: rows of x by cp.async, parts of the weight by TMA."""
    size: gl.constexpr = w_desc.dtype.primitive_bitwidth // 8
    part_depth: gl.constexpr = ROW_BYTES // size
    num_steps: gl.constexpr = (routes.depth + part_depth - 1) // part_depth
    # 16 bytes a thread.
    layout: gl.constexpr = gl.BlockedLayout([1, 16 // size], [4, 8], [4, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    column = gl.expand_dims(gl.arange(0, part_depth, layout=gl.SliceLayout(0, layout)), 0)
    num_filled = 0
    for number in range(gl.program_id(0), routes.num_tiles, gl.num_programs(0)):
        tile = _find_tile(number, routes)
        if tile.is_mine:
            block_ptr = routes.routes_ptr + tile.block * (2 * ROWS)
            upper = gl.load(block_ptr + gl.arange(0, ROWS, layout=by_row))
            lower = gl.load(block_ptr + ROWS + gl.arange(0, ROWS, layout=by_row))
            if x_scales_ptr is not None:
                both = gl.load(block_ptr + gl.arange(0, 2 * ROWS, layout=flat))
            parts: gl.constexpr = 2 if routes.is_gated else 1
            first = tile.expert * (parts * routes.width) + tile.first_column
            second = first + (routes.width if routes.is_gated else COLUMNS)
            for step in range(num_steps):
                stage, phase = num_filled % NUM_STAGES, (num_filled // NUM_STAGES) & 1
                k = step * part_depth
                mbarrier.wait(buffers.free.index(stage), phase ^ 1)
                ready = buffers.ready.index(stage)
                mbarrier.expect(ready, 2 * COLUMNS * ROW_BYTES)
                tma_load(w_desc, [first, k], ready, buffers.w.index(2 * stage))
                tma_load(w_desc, [second, k], ready, buffers.w.index(2 * stage + 1))
                for group in gl.static_range(2):
                    _copy_rows(x_ptr, upper if group == 0 else lower, k + column, k + column < routes.depth, buffers.x.index(2 * stage + group), routes)
                if x_scales_ptr is not None:
                    at = x_scales_ptr + both // routes.top_k * x_scales_stride_row + step * x_scales_stride_block
                    copy_async(buffers.x_scales.index(stage), at, mask=both >= 0)
                async_copy.mbarrier_arrive(ready, increment_count=False)  # each thread, when its rows have come
                num_filled += 1


@gluon.jit
def _dequantize(codes, scales):
    """Return the values of a group of packed codes uint8 [COLUMNS, 16], the lower halves' first, with scales [COLUMNS]."""
    if scales.dtype == gl.uint8:
        factors = scales.to(gl.uint16) << 7
        factors = gl.where(factors == 0, 1 << 6, factors).to(gl.uint16).to(gl.bfloat16, bitcast=True)  # 2^-127
    else:
        factors = scales
    asm: gl.constexpr = FP4 if scales.dtype == gl.uint8 else INT4
    factors = gl.expand_dims(factors, 1).broadcast_to(codes.shape)
    low, high = gl.inline_asm_elementwise(
        asm, "=r,=r,=r,=r,r,r,r", [codes, factors], (gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
    )
    return gl.join(low, high).permute(0, 2, 1).reshape([COLUMNS, GROUP])


@gluon.jit
def _load_codes(w_desc, first, step, codes, codes_ready, num_loaded):
    """Ask for the codes of a step."""
    slot = num_loaded % NUM_CODES
    mbarrier.expect(codes_ready.index(slot), COLUMNS * GROUP)
    tma_load(w_desc, [first, step * GROUP], codes_ready.index(slot), codes.index(slot))


@gluon.jit
def _convert(part: gl.constexpr, x_ptr, w_desc, scales_ptr, codes, codes_ready, buffers, routes):
    """Fill stages: a consumer's rows of x by cp.async, a part of the weight dequantized, two groups at a time."""
    part_depth: gl.constexpr = buffers.x.shape[2]
    num_bytes: gl.constexpr = GROUP // 2
    num_steps: gl.constexpr = routes.depth // part_depth
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_thread: gl.constexpr = gl.BlockedLayout([1, num_bytes], [32, 1], [4, 1], [1, 0])  # a row of the weight
    weight_row: gl.constexpr = gl.SliceLayout(1, by_thread)
    column = gl.arange(0, part_depth, layout=gl.SliceLayout(0, layout))
    column = column // GROUP * num_bytes + column % num_bytes + column // num_bytes % 2 * (routes.depth // 2)
    column = gl.expand_dims(column, 0)
    parts: gl.constexpr = 2 if routes.is_gated else 1
    last = routes.num_experts * (parts * routes.width) - 1
    num_filled = 0
    for number in range(gl.program_id(0), routes.num_tiles, gl.num_programs(0)):
        tile = _find_tile(number, routes)
        if tile.is_mine:
            route = gl.load(routes.routes_ptr + tile.block * (2 * ROWS) + part * ROWS + gl.arange(0, ROWS, layout=by_row))
            first = tile.expert * (parts * routes.width) + tile.first_column
            if part == 1:
                first += routes.width if routes.is_gated else COLUMNS
            at = gl.minimum(first + gl.arange(0, COLUMNS, layout=weight_row), last).to(gl.int64)
            scales_at = scales_ptr + at * (routes.depth // GROUP)
            for step in gl.static_range(NUM_CODES):
                if step < num_steps:
                    _load_codes(w_desc, first, step, codes, codes_ready, num_filled + step)
            first_scales, second_scales = gl.load(scales_at), gl.load(scales_at + 1)
            group = gl.minimum(1, num_steps - 1) * 2
            next_first, next_second = gl.load(scales_at + group), gl.load(scales_at + group + 1)
            for step in range(num_steps):
                stage, phase = num_filled % NUM_STAGES, (num_filled // NUM_STAGES) & 1
                slot, slot_phase = num_filled % NUM_CODES, (num_filled // NUM_CODES) & 1
                group = gl.minimum(step + 2, num_steps - 1) * 2
                mbarrier.wait(buffers.free.index(stage), phase ^ 1)
                ready = buffers.ready.index(stage)
                _copy_rows(x_ptr, route, step * GROUP + column, column >= 0, buffers.x.index(2 * stage + part), routes)
                async_copy.mbarrier_arrive(ready, increment_count=False)
                mbarrier.wait(codes_ready.index(slot), slot_phase)
                packed = codes.index(slot)
                w = buffers.w.index(2 * stage + part)
                values = _dequantize(packed.slice(0, num_bytes, dim=1).load(by_thread), first_scales)
                w.slice(0, GROUP, dim=1).store(values.to(w.dtype))
                values = _dequantize(packed.slice(num_bytes, num_bytes, dim=1).load(by_thread), second_scales)
                w.slice(GROUP, GROUP, dim=1).store(values.to(w.dtype))
                first_scales, second_scales = next_first, next_second
                next_first, next_second = gl.load(scales_at + group), gl.load(scales_at + group + 1)
                fence_async_shared()
                barrier()
                mbarrier.arrive(ready, count=1)
                if step + NUM_CODES < num_steps:
                    _load_codes(w_desc, first, step + NUM_CODES, codes, codes_ready, num_filled + NUM_CODES)
                num_filled += 1


@gluon.jit
def _multiply(group: gl.constexpr, w_scales_ptr, buffers, tile, num_read, routes):
    """Return the products of a consumer's rows with both parts [ROWS, COLUMNS] float32."""
    is_fp8: gl.constexpr = buffers.x_scales is not None
    part_depth: gl.constexpr = buffers.x.shape[2]
    num_steps: gl.constexpr = (routes.depth + part_depth - 1) // part_depth
    layout: gl.constexpr = PRODUCT_FP8 if is_fp8 else PRODUCT
    row: gl.constexpr = gl.SliceLayout(1, layout)
    first = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    second = first
    if is_fp8:
        num_blocks: gl.constexpr = routes.width // COLUMNS
        parts: gl.constexpr = 2 if routes.is_gated else 1
        block = tile.expert * (parts * num_blocks) + tile.first_column // COLUMNS
        # The second part of a last tile may lie past the end: it is not stored.
        other = gl.minimum(block + (num_blocks if routes.is_gated else 1), routes.num_experts * parts * num_blocks - 1)
        first_scale, second_scale = gl.load(w_scales_ptr + block * num_steps), gl.load(w_scales_ptr + other * num_steps)
    for step in range(num_steps):
        stage, phase = num_read % NUM_STAGES, (num_read // NUM_STAGES) & 1
        mbarrier.wait(buffers.ready.index(stage), phase)
        fence_async_shared()  # between the producer's copies of rows and the tensor cores' reads
        x = stage_of(buffers.x, 2 * stage + group)
        if is_fp8:
            following = gl.minimum(step + 1, num_steps - 1)  # scales are there before their products
            x_scales = buffers.x_scales.index(stage).slice(group * ROWS, ROWS).load(row)
            for part in gl.static_range(2):
                w = stage_of(buffers.w, 2 * stage + part).permute((1, 0))
                product = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
                product = warpgroup_mma(x, w, product, use_acc=False, is_async=True)
                product = warpgroup_mma_wait(0, deps=[product])
                if part == 0:
                    first += product * gl.expand_dims(x_scales * first_scale, 1)
                    first_scale = gl.load(w_scales_ptr + block * num_steps + following)
                else:
                    mbarrier.arrive(buffers.free.index(stage), count=1)
                    second += product * gl.expand_dims(x_scales * second_scale, 1)
                    second_scale = gl.load(w_scales_ptr + other * num_steps + following)
        else:
            first = warpgroup_mma(x, stage_of(buffers.w, 2 * stage).permute((1, 0)), first, is_async=True)
            second = warpgroup_mma(x, stage_of(buffers.w, 2 * stage + 1).permute((1, 0)), second, is_async=True)
            first, second = warpgroup_mma_wait(2, deps=[first, second])  # those of the step before are done
            if step > 0:
                mbarrier.arrive(buffers.free.index((num_read - 1) % NUM_STAGES), count=1)
        num_read += 1
    if not is_fp8:
        first, second = warpgroup_mma_wait(0, deps=[first, second])
        mbarrier.arrive(buffers.free.index((num_read - 1) % NUM_STAGES), count=1)
    return first, second, num_read


@gluon.jit
def _store(values, buffer, out_ptr, routes_ptr, first_column, WIDTH: gl.constexpr, BY_HALVES: gl.constexpr):
    """Store results of a consumer's routes [ROWS, COLUMNS], through shared memory: so a warp writes whole rows."""
    size: gl.constexpr = buffer.dtype.primitive_bitwidth // 8
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 16 // size], [32 * 16 // size // COLUMNS, COLUMNS // (16 // size)], [4, 1], [1, 0]
    )
    if BY_HALVES:
        values = values.reshape([ROWS, COLUMNS // 2, 2]).permute(0, 2, 1).reshape([ROWS, COLUMNS])
    barrier()  # the results before have left
    buffer.store(values.to(buffer.dtype))
    barrier()
    route = gl.load(routes_ptr + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    is_inside = first_column + column < WIDTH
    if BY_HALVES:
        half: gl.constexpr = COLUMNS // 2
        is_inside = first_column + column % half * 2 < WIDTH
        column = first_column // 2 + column % half + column // half * (WIDTH // 2)
    else:
        column += first_column
    column = gl.expand_dims(column, 0)
    at = out_ptr + gl.expand_dims(route.to(gl.int64) * WIDTH, 1) + column
    gl.store(at, buffer.load(layout), mask=gl.expand_dims(route >= 0, 1) & gl.expand_dims(is_inside, 0))


@gluon.jit
def _consume(group: gl.constexpr, w_scales_ptr, results, buffers, routes, dtype: gl.constexpr, BY_HALVES: gl.constexpr):
    """Multiply a half of each block's routes, and store what comes of them."""
    expert_weights_ptr, out_ptr, out_scales_ptr, out_scales_stride, limit = results
    num_read = 0
    for number in range(gl.program_id(0), routes.num_tiles, gl.num_programs(0)):
        tile = _find_tile(number, routes)
        if tile.is_mine:
            first, second, num_read = _multiply(group, w_scales_ptr, buffers, tile, num_read, routes)
            routes_ptr = routes.routes_ptr + tile.block * (2 * ROWS) + group * ROWS
            buffer = buffers.out.index(group)
            if routes.is_gated:
                route = gl.load(routes_ptr + gl.arange(0, ROWS, layout=gl.SliceLayout(1, first.type.layout)))
                weight = gl.load(expert_weights_ptr + route, mask=route >= 0, other=0.0)
                h = (swiglu(first, second, limit) * gl.expand_dims(weight, 1)).to(dtype)
                if out_scales_ptr is not None:  # the columns are one group
                    h = h.to(gl.float32)
                    s = group_scale(gl.max(gl.abs(h), 1))
                    at = out_scales_ptr + route + tile.first_column // COLUMNS * out_scales_stride
                    gl.store(at, s, mask=route >= 0)
                    h = to_fp8(divide(h, gl.expand_dims(s, 1)))
                _store(h, buffer, out_ptr, routes_ptr, tile.first_column, routes.width, BY_HALVES)
            else:
                _store(first, buffer, out_ptr, routes_ptr, tile.first_column, routes.width, False)
                _store(second, buffer, out_ptr, routes_ptr, tile.first_column + COLUMNS, routes.width, False)


@gluon.jit(do_not_specialize=["num_tiles", "x_scales_stride_block", "out_scales_stride"])
def grouped_product_kernel(
    x_ptr,
    x_scales_ptr,
    x_scales_stride_row,
    x_scales_stride_block,
    w_desc,
    w_scales_ptr,
    experts_ptr,
    routes_ptr,
    expert_weights_ptr,
    out_ptr,
    out_scales_ptr,
    out_scales_stride,
    limit,
    num_tiles,
    num_experts,
    TOP_K: gl.constexpr,
    WIDTH: gl.constexpr,
    K: gl.constexpr,
    GATED: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Multiply rows of blocks of routes by their experts' weights; as many programs as run at a time.

    w_desc: rows [E PARTS WIDTH, K]. Gated, the two parts are gates and what they gate: the result is silu(gate) * up,
        times the route's weight, rounded to DTYPE. One part is a plain product.
    out_scales_ptr: where a gated result is quantized in groups of 128, its scales, a column after the other.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    bits: gl.constexpr = dtype.primitive_bitwidth
    depth: gl.constexpr = ROW_BYTES // (bits // 8)
    out: gl.constexpr = out_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    out_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=out.primitive_bitwidth, rank=2
    )
    x_scales = None
    if x_scales_ptr is not None:
        x_scales = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 2 * ROWS], SCALES)
    is_packed: gl.constexpr = w_desc.dtype == gl.uint8
    buffers = Buffers(
        gl.allocate_shared_memory(dtype, [2 * NUM_STAGES, ROWS, depth], layout),
        gl.allocate_shared_memory(dtype, [2 * NUM_STAGES, COLUMNS, depth], layout),
        x_scales,
        gl.allocate_shared_memory(out, [2, ROWS, COLUMNS], out_layout),
        allocate_mbarriers(NUM_STAGES, 2 + 256 if is_packed else 1 + 128),  # TMA or stores, and a producer's threads
        allocate_mbarriers(NUM_STAGES, 2),  # both consumers
    )
    fence_async_shared()
    routes = Routes(experts_ptr, routes_ptr, num_tiles, num_experts, TOP_K, WIDTH, K, GATED)
    results = (expert_weights_ptr, out_ptr, out_scales_ptr, out_scales_stride, limit)
    if is_packed:
        codes_layout: gl.constexpr = w_desc.layout
        first_codes = gl.allocate_shared_memory(gl.uint8, [NUM_CODES, COLUMNS, GROUP], codes_layout)
        second_codes = gl.allocate_shared_memory(gl.uint8, [NUM_CODES, COLUMNS, GROUP], codes_layout)
        first_ready, second_ready = allocate_mbarriers(NUM_CODES, 1), allocate_mbarriers(NUM_CODES, 1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_consume, (0, None, results, buffers, routes, DTYPE, True)),
                (_consume, (1, None, results, buffers, routes, DTYPE, True)),
                (_convert, (0, x_ptr, w_desc, w_scales_ptr, first_codes, first_ready, buffers, routes)),
                (_convert, (1, x_ptr, w_desc, w_scales_ptr, second_codes, second_ready, buffers, routes)),
            ],
            [4, 4, 4],
            [168, 88, 88],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, w_scales_ptr, results, buffers, routes, DTYPE, False)),
                (_consume, (1, w_scales_ptr, results, buffers, routes, DTYPE, False)),
                (_produce, (x_ptr, x_scales_ptr, x_scales_stride_row, x_scales_stride_block, w_desc, buffers, routes)),
            ],
            [4, 4],
            [216, 72],
        )


def takes(x: Tensor, weights: Tensor) -> bool:
    """Return whether the kernel multiplies rows x [T, H], before any quantization, by experts' weights [E, N, K]."""
    if not x.is_cuda or torch.version.cuda is None or torch.cuda.get_device_capability(x.device)[0] != 9:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16):
        return False
    width, hidden = weights.shape[1] // 2, x.shape[1]
    if weights.dtype == torch.uint8:
        return hidden % 64 == 0 and width % 64 == 0
    # TMA and cp.async bring 16 bytes at a time.
    return weights.dtype in (x.dtype, FP8) and (hidden * weights.itemsize) % 16 == 0 and (width * weights.itemsize) % 16 == 0


def multiply_gated(
    x: Tensor | QuantizedRows,
    weights: Tensor,
    scales: Tensor | None,
    blocks: tuple[Tensor, Tensor],
    expert_weights: Tensor,
    limit: float | None,
    dtype: torch.dtype,
) -> Tensor | QuantizedRows:
    """Return silu(gate) * up of each route, times the route's weight, [routes, I] in dtype or quantized as x is.

    Args:
        x: [T, H], quantized where the weights are.
        weights: [E, 2 I, H].
        blocks: experts [blocks] and routes [blocks, BLOCK_ROWS] of `blocks.assign_blocks`.
        expert_weights: float32 [T, k].
        limit: `model.experts.compute_experts`'s swiglu_limit.
    """
    num_routes, width = expert_weights.numel(), weights.shape[1] // 2
    out = torch.empty(num_routes, width, dtype=dtype, device=weights.device)
    result = QuantizedRows.empty_like(out) if isinstance(x, QuantizedRows) else out
    _launch(x, weights.unflatten(1, (2, width)), scales, blocks, result, expert_weights, limit, dtype)
    return result


def multiply(
    h: Tensor | QuantizedRows, weights: Tensor, scales: Tensor | None, blocks: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """Return each route's row of h [routes, I] times its expert's of weights [E, H, I], [routes, H] in dtype."""
    values = h.values if isinstance(h, QuantizedRows) else h
    out = torch.empty(len(values), weights.shape[1], dtype=dtype, device=weights.device)
    _launch(h, weights.unsqueeze(1), scales, blocks, out, None, None, dtype)
    return out


def _launch(
    x: Tensor | QuantizedRows,
    weights: Tensor,
    scales: Tensor | None,
    blocks: tuple[Tensor, Tensor],
    out: Tensor | QuantizedRows,
    expert_weights: Tensor | None,
    limit: float | None,
    dtype: torch.dtype,
) -> None:
    """Launch one product; with expert_weights it is the gated one. weights: [E, parts, width, K]."""
    num_experts, _, width = weights.shape[:3]
    is_gated = expert_weights is not None
    values, x_scales = x if isinstance(x, QuantizedRows) else (x, None)
    results, out_scales = out if isinstance(out, QuantizedRows) else (out, None)
    k = values.shape[1]
    width_bytes = ROW_BYTES.value if weights.dtype != torch.uint8 else _GROUP
    layout = gl.NVMMASharedLayout(swizzle_byte_width=width_bytes, element_bitwidth=8 * weights.itemsize, rank=2)
    rows = weights.reshape(-1, weights.shape[-1])
    box = [COLUMNS.value, width_bytes // weights.itemsize]
    desc = TensorDescriptor(rows, list(rows.shape), list(rows.stride()), box, layout)
    columns = COLUMNS.value if is_gated else 2 * COLUMNS.value
    num_tiles = len(blocks[0]) * triton.cdiv(width, columns)
    num_programs = torch.cuda.get_device_properties(weights.device).multi_processor_count
    grouped_product_kernel[(min(num_programs, num_tiles),)](
        values.contiguous(),
        x_scales,
        *((0, 0) if x_scales is None else x_scales.stride()),
        desc,
        scales,
        *blocks,
        expert_weights,
        results,
        out_scales,
        0 if out_scales is None else out_scales.stride(1),
        limit,
        num_tiles,
        num_experts,
        TOP_K=1 if expert_weights is None else expert_weights.shape[1],
        WIDTH=width,
        K=k,
        GATED=is_gated,
        DTYPE=_GLUON[dtype],
        num_warps=4,
    )
