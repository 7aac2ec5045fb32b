"""The pipeline between the warps of a program: tiles of the result, stages in shared memory, and their mbarriers.

Every role iterates over the program's tiles by itself, and over the steps of a tile, each a piece of the depth. The
roles synchronize by one ring (`attention.hopper.stage_ring`): its stages hold rows and weights of a step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dcpmla.attention.hopper.compat import aggregate
from dcpmla.attention.hopper.stage_ring import Ring, new_ring

BLOCK_ROWS = 128  # routes of a block
ROWS = gl.constexpr(BLOCK_ROWS // 2)  # routes per consumer
COLUMNS = gl.constexpr(128)  # rows of the weight per part; equals fp8's block size and a result's group size
ROW_BYTES = gl.constexpr(128)  # bytes of a row per stage: the width of a swizzle
NUM_STAGES = gl.constexpr(3)
WARPGROUP = gl.constexpr(128)  # threads


@aggregate
class Buffers:
    """Stages of rows and weights, their ring, and results on their way out."""

    x: gl.shared_memory_descriptor  # [2 stages, ROWS, depth], a consumer's rows after the other's
    x_scales: gl.base_value  # float32 [stages, 2 ROWS]; None for rows of 16 bits
    w: gl.shared_memory_descriptor  # [stages, 2 COLUMNS, depth], a part after the other
    out: gl.shared_memory_descriptor  # [2, ROWS, COLUMNS]
    ring: Ring  # stages of x, x_scales and w


@aggregate
class Routes:
    """A product's routes in blocks of one expert each, and its sizes."""

    experts_ptr: gl.tensor  # int32, of each block
    routes_ptr: gl.tensor  # int32 [blocks, BLOCK_ROWS], -1 for none
    num_blocks: gl.tensor
    num_experts: gl.tensor
    top_k: gl.constexpr  # row route // top_k of x is a route's
    width: gl.constexpr  # rows of an expert's weight in a part
    depth: gl.constexpr  # columns of the weight
    is_gated: gl.constexpr  # the weight has two parts, gate and up; else a tile takes two adjacent parts of one
    scale_steps: gl.constexpr  # steps of packed codes that share a number of their scales


@aggregate
class Tile:
    """A tile of the result: a block's routes by COLUMNS of each part."""

    block: gl.tensor
    expert: gl.tensor
    first_column: gl.tensor  # start of the first part


@gluon.jit
def _tiles_of_block(routes):
    columns: gl.constexpr = COLUMNS if routes.is_gated else 2 * COLUMNS
    return (routes.width + columns - 1) // columns


@gluon.jit
def num_tiles(routes):
    """Return the number of tiles of the result."""
    return routes.num_blocks * _tiles_of_block(routes)


@gluon.jit
def find_tile(number, routes):
    """Return a tile by its number. Tiles of a block are adjacent, so that concurrent programs share rows in the L2."""
    columns: gl.constexpr = COLUMNS if routes.is_gated else 2 * COLUMNS
    block = number // _tiles_of_block(routes)
    return Tile(block, gl.load(routes.experts_ptr + block), number % _tiles_of_block(routes) * columns)


@gluon.jit
def find_weights(tile, part, routes):
    """Return the row, of all experts' weights one after the other, at which a part of a tile begins."""
    parts: gl.constexpr = 2 if routes.is_gated else 1
    distance: gl.constexpr = routes.width if routes.is_gated else COLUMNS
    return tile.expert * (parts * routes.width) + tile.first_column + part * distance


@gluon.jit
def num_weight_rows(routes):
    """Return the number of rows of all experts' weights."""
    return routes.num_experts * (2 * routes.width if routes.is_gated else routes.width)


@gluon.jit
def new_buffers(dtype: gl.constexpr, out_dtype: gl.constexpr, HAS_SCALES: gl.constexpr, NUM_ARRIVALS: gl.constexpr):
    """Allocate the stages. NUM_ARRIVALS: Arrivals per filled stage from producers of weights."""
    bits: gl.constexpr = dtype.primitive_bitwidth
    out_bits: gl.constexpr = out_dtype.primitive_bitwidth
    depth: gl.constexpr = ROW_BYTES * 8 // bits
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    out_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=out_bits, rank=2)
    x_scales = None
    if HAS_SCALES:
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        x_scales = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 2 * ROWS], flat)
    return Buffers(
        gl.allocate_shared_memory(dtype, [2 * NUM_STAGES, ROWS, depth], layout),
        x_scales,
        gl.allocate_shared_memory(dtype, [NUM_STAGES, 2 * COLUMNS, depth], layout),
        gl.allocate_shared_memory(out_dtype, [2, ROWS, COLUMNS], out_layout),
        new_ring(NUM_STAGES, WARPGROUP + NUM_ARRIVALS, 2),
    )
