"""The consumers of a grouped product, two groups of four warps: each multiplies half of a block's routes by both parts
of the weights, and stores the results.

While one group scales a product in fp8, or stores, the tensor cores work for the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dcpmla.attention.hopper.compat import barrier
from dcpmla.attention.hopper.stage_ring import await_ready, free_at, stage_of
from dcpmla.model.hopper.pipeline import COLUMNS, ROWS, find_tile, find_weights, num_tiles, num_weight_rows
from dcpmla.model.kernels import glu
from dcpmla.parallel.kernels import quantize

activate = gluon.jit(glu.activate.fn)
divide = gluon.jit(quantize.divide.fn)
group_scale = gluon.jit(quantize.group_scale.fn)
to_fp8 = gluon.jit(quantize.to_fp8.fn)

_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_PRODUCT_FP8 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))


@gluon.jit
def _await(buffers, num_read):
    """Wait for a stage, and return it."""
    stage = await_ready(buffers.ring, num_read)
    fence_async_shared()  # rows were copied by threads and must be visible to the tensor cores
    return stage


@gluon.jit
def _weights(buffers, stage, part: gl.constexpr):
    return stage_of(buffers.w, stage).slice(part * COLUMNS, COLUMNS).permute((1, 0))


@gluon.jit
def _multiply(group: gl.constexpr, buffers, num_read, routes):
    """Return the products of a consumer's rows with both parts [ROWS, COLUMNS] float32, and the steps read so far."""
    depth: gl.constexpr = buffers.x.shape[2]
    first = gl.zeros([ROWS, COLUMNS], gl.float32, _PRODUCT)
    second = first
    for step in range((routes.depth + depth - 1) // depth):
        stage = _await(buffers, num_read)
        x = stage_of(buffers.x, 2 * stage + group)
        first = warpgroup_mma(x, _weights(buffers, stage, 0), first, is_async=True)
        second = warpgroup_mma(x, _weights(buffers, stage, 1), second, is_async=True)
        first, second = warpgroup_mma_wait(2, deps=[first, second])  # the previous step's products
        if step > 0:
            mbarrier.arrive(free_at(buffers.ring, num_read - 1), count=1)
        num_read += 1
    first, second = warpgroup_mma_wait(0, deps=[first, second])
    mbarrier.arrive(free_at(buffers.ring, num_read - 1), count=1)
    return first, second, num_read


@gluon.jit
def _skip(buffers, num_read, routes):
    """Release a tile's stages without use, and return the steps read so far."""
    depth: gl.constexpr = buffers.x.shape[2]
    for _ in range((routes.depth + depth - 1) // depth):
        _await(buffers, num_read)
        mbarrier.arrive(free_at(buffers.ring, num_read), count=1)
        num_read += 1
    return num_read


@gluon.jit
def _multiply_fp8(group: gl.constexpr, w_scales_ptr, buffers, tile, num_read, routes):
    """Compute `_multiply` in e4m3: a step's products, 128 of the depth, are scaled in float32, and added by one
    rounding.
    """
    num_steps: gl.constexpr = routes.depth // COLUMNS
    row: gl.constexpr = gl.SliceLayout(1, _PRODUCT_FP8)
    first = gl.zeros([ROWS, COLUMNS], gl.float32, _PRODUCT_FP8)
    second = first
    block = find_weights(tile, 0, routes) // COLUMNS
    # The second part of a block's last tile may exceed the weights; its result is not stored.
    other = gl.minimum(find_weights(tile, 1, routes), num_weight_rows(routes) - 1) // COLUMNS
    first_at, second_at = w_scales_ptr + block * num_steps, w_scales_ptr + other * num_steps
    first_scale, second_scale = gl.load(first_at), gl.load(second_at)
    for step in range(num_steps):
        following = gl.minimum(step + 1, num_steps - 1)  # scales are loaded one step ahead
        stage = _await(buffers, num_read)
        x = stage_of(buffers.x, 2 * stage + group)
        x_scales = buffers.x_scales.index(stage).slice(group * ROWS, ROWS).load(row)
        for part in gl.static_range(2):
            product = gl.zeros([ROWS, COLUMNS], gl.float32, _PRODUCT_FP8)
            product = warpgroup_mma(x, _weights(buffers, stage, part), product, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=[product])
            if part == 0:
                first = gl.fma(product, gl.expand_dims(x_scales * first_scale, 1), first)
                first_scale = gl.load(first_at + following)
            else:
                mbarrier.arrive(free_at(buffers.ring, num_read), count=1)
                second = gl.fma(product, gl.expand_dims(x_scales * second_scale, 1), second)
                second_scale = gl.load(second_at + following)
        num_read += 1
    return first, second, num_read


@gluon.jit
def _store(values, buffer, out_ptr, routes_ptr, first_column, WIDTH: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Store results of a consumer's routes [ROWS, COLUMNS], through shared memory, so that a warp writes whole rows."""
    size: gl.constexpr = buffer.dtype.primitive_bitwidth // 8
    lanes: gl.constexpr = COLUMNS * size // 16  # lanes per row, each with 16 bytes
    layout: gl.constexpr = gl.BlockedLayout([1, 16 // size], [32 // lanes, lanes], [4, 1], [1, 0])
    if INTERLEAVED:
        values = values.reshape([ROWS, COLUMNS // 8, 2, 4]).permute(0, 1, 3, 2).reshape([ROWS, COLUMNS])
    barrier()  # the previous results have been read
    buffer.store(values.to(buffer.dtype))
    barrier()
    route = gl.load(routes_ptr + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)))
    column = gl.expand_dims(first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout)), 0)
    at = out_ptr + gl.expand_dims(route.to(gl.int64) * WIDTH, 1) + column
    gl.store(at, buffer.load(layout), mask=gl.expand_dims(route >= 0, 1) & (column < WIDTH))


@gluon.jit
def consume(
    group: gl.constexpr, w_scales_ptr, results, buffers, routes, dtype: gl.constexpr, INTERLEAVED: gl.constexpr
):
    """Compute and store a half of each block's routes.

    results: Arguments of `product.grouped_product_kernel` by these names.
    dtype: Dtype to which a gated result is rounded, also before it is quantized.
    INTERLEAVED: Whether a gated result is stored in the column order of 4-bit weights.
    """
    expert_weights_ptr, out_ptr, out_scales_ptr, out_scales_stride, gate_bound, up_bound, IS_SMOOTH = results
    num_read = 0
    for number in range(gl.program_id(0), num_tiles(routes), gl.num_programs(0)):
        tile = find_tile(number, routes)
        routes_ptr = routes.routes_ptr + tile.block * (2 * ROWS) + group * ROWS
        if gl.load(routes_ptr) < 0:  # the block has no route for this consumer
            num_read = _skip(buffers, num_read, routes)
        else:
            if buffers.x_scales is not None:
                first, second, num_read = _multiply_fp8(group, w_scales_ptr, buffers, tile, num_read, routes)
            else:
                first, second, num_read = _multiply(group, buffers, num_read, routes)
            buffer = buffers.out.index(group)
            if routes.is_gated:
                route = gl.load(routes_ptr + gl.arange(0, ROWS, layout=gl.SliceLayout(1, first.type.layout)))
                weight = gl.load(expert_weights_ptr + route, mask=route >= 0, other=0.0)
                h = (activate(first, second, gate_bound, up_bound, IS_SMOOTH) * gl.expand_dims(weight, 1)).to(dtype)
                if out_scales_ptr is not None:  # the columns are one group
                    h = h.to(gl.float32)
                    s = group_scale(gl.max(gl.abs(h), 1))
                    at = out_scales_ptr + route + tile.first_column // COLUMNS * out_scales_stride
                    gl.store(at, s, mask=route >= 0)
                    h = to_fp8(divide(h, gl.expand_dims(s, 1)))
                _store(h, buffer, out_ptr, routes_ptr, tile.first_column, routes.width, INTERLEAVED)
            else:
                _store(first, buffer, out_ptr, routes_ptr, tile.first_column, routes.width, False)
                _store(second, buffer, out_ptr, routes_ptr, tile.first_column + COLUMNS, routes.width, False)
