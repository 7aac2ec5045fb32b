"""The pipeline between the warps of a program: stages in shared memory, and the mbarriers that synchronize them.

The unit of work is a segment: the tiles that a part has of one request. Each role, a producer or a consumer, iterates
over the segments of its part and synchronizes with other roles at mbarriers: a `ready` mbarrier completes a phase when
a stage is filled, a `free` mbarrier when all its consumers have read it. Phases have a parity, so roles count their
uses of a stage. The counts are the same in all threads (`schedule.uniform`), and so are the addresses of stages: else
the tensor cores would wait for them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from dcpmla.attention.hopper.compat import aggregate
from dcpmla.attention.hopper.schedule import HALF, KEYS, ROPE, ROWS

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@aggregate
class Buffers:
    """Tiles in shared memory, each row in three pieces: both halves of the latent and the rope part.

    Shared keys and their queries have no rope part.
    """

    q_left: gl.shared_memory_descriptor  # [1, ROWS, HALF], later a half of the output
    q_right: gl.shared_memory_descriptor
    q_pe: gl.base_value  # [1, ROWS, ROPE], or None
    k_left: gl.shared_memory_descriptor  # [stages, KEYS, HALF]
    k_right: gl.shared_memory_descriptor
    k_pe: gl.base_value  # [stages, KEYS, ROPE], or None
    probs: gl.shared_memory_descriptor  # [stages, ROWS, KEYS], numerators of the softmax; of one stage [ROWS, KEYS]
    factors: gl.shared_memory_descriptor  # float32 [stages, ROWS] or [ROWS], factors of the sums so far
    lses: gl.base_value  # float32 [ROWS] if all of the output is computed from the buffers, else None


@aggregate
class Barriers:
    """mbarriers for the tiles of `Buffers`: filled, and free again.

    The two of `merge_ready` open when a part's first request, and its last, can be merged.
    """

    q_ready: gl.shared_memory_descriptor
    left_ready: gl.shared_memory_descriptor  # [stages]
    right_ready: gl.shared_memory_descriptor
    probs_ready: gl.shared_memory_descriptor
    merge_ready: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    left_free: gl.shared_memory_descriptor
    right_free: gl.shared_memory_descriptor
    probs_free: gl.shared_memory_descriptor


@gluon.jit
def new_buffers(q_desc, q_pe_desc, NUM_STAGES: gl.constexpr, NUM_PROBS: gl.constexpr, HAS_LSES: gl.constexpr):
    """Allocate one tile of queries, NUM_STAGES tiles of keys and NUM_PROBS tiles of probabilities."""
    dtype: gl.constexpr = q_desc.dtype
    half: gl.constexpr = q_desc.layout
    rope: gl.constexpr = half if q_pe_desc is None else q_pe_desc.layout
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(dtype, [1, ROWS, HALF], half)
    q_right = gl.allocate_shared_memory(dtype, [1, ROWS, HALF], half)
    q_pe = None
    if q_pe_desc is not None:
        q_pe = gl.allocate_shared_memory(dtype, [1, ROWS, ROPE], rope)
    k_left = gl.allocate_shared_memory(dtype, [NUM_STAGES, KEYS, HALF], half)
    k_right = gl.allocate_shared_memory(dtype, [NUM_STAGES, KEYS, HALF], half)
    k_pe = None
    if q_pe_desc is not None:
        k_pe = gl.allocate_shared_memory(dtype, [NUM_STAGES, KEYS, ROPE], rope)
    probs = gl.allocate_shared_memory(dtype, [NUM_PROBS, ROWS, KEYS], rope)
    factors = gl.allocate_shared_memory(gl.float32, [NUM_PROBS, ROWS], flat)
    if NUM_PROBS == 1:
        probs, factors = probs.index(0), factors.index(0)
    lses = None
    if HAS_LSES:
        lses = gl.allocate_shared_memory(gl.float32, [ROWS], flat)
    return Buffers(q_left, q_right, q_pe, k_left, k_right, k_pe, probs, factors, lses)


@gluon.jit
def allocate_mbarriers(number: gl.constexpr, count: gl.constexpr):
    """Allocate mbarriers of `count` arrivals a phase."""
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(number):
        mbarrier.init(barriers.index(index), count=count)
    return barriers


@gluon.jit
def new_barriers(
    NUM_STAGES: gl.constexpr, NUM_PROBS: gl.constexpr, Q_CONSUMERS: gl.constexpr, PROBS_CONSUMERS: gl.constexpr
):
    """Allocate the mbarriers of a program, by the numbers of roles that read its queries and probabilities."""
    q_ready, q_free = allocate_mbarriers(1, 1).index(0), allocate_mbarriers(1, Q_CONSUMERS).index(0)
    left_ready, left_free = allocate_mbarriers(NUM_STAGES, 1), allocate_mbarriers(NUM_STAGES, 1)
    right_ready, right_free = allocate_mbarriers(NUM_STAGES, 1), allocate_mbarriers(NUM_STAGES, 1)
    probs_ready, probs_free = allocate_mbarriers(NUM_PROBS, 1), allocate_mbarriers(NUM_PROBS, PROBS_CONSUMERS)
    merge_ready = allocate_mbarriers(2, 1)
    fence_async_shared()
    return Barriers(
        q_ready, left_ready, right_ready, probs_ready, merge_ready, q_free, left_free, right_free, probs_free
    )


@gluon.jit
def stage_of(buffer, index=0):
    """Return a stage of a buffer.

    The index is hidden from the front half of the compiler, which would compute all addresses early and spill them.
    """
    return buffer.index(
        gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(index)], dtype=gl.int32, is_pure=False, pack=1
        )
    )


@gluon.jit
def _multiply(queries, keys, stage, scores):
    """Start one of the products."""
    return warpgroup_mma(stage_of(queries), stage_of(keys, stage).permute((1, 0)), scores, is_async=True)


@gluon.jit
def start_scores(buffers, barriers, tile, layout: gl.constexpr):
    """Start the queries' asynchronous products with the pieces of a tile of keys; return the pending scores."""
    num_stages: gl.constexpr = buffers.k_left.shape[0]
    stage, phase = tile % num_stages, (tile // num_stages) & 1
    scores = gl.zeros([ROWS, KEYS], gl.float32, layout)
    mbarrier.wait(barriers.left_ready.index(stage), phase)
    scores = _multiply(buffers.q_left, buffers.k_left, stage, scores)
    if buffers.k_pe is not None:
        scores = _multiply(buffers.q_pe, buffers.k_pe, stage, scores)
    mbarrier.wait(barriers.right_ready.index(stage), phase)
    return _multiply(buffers.q_right, buffers.k_right, stage, scores)


@gluon.jit
def exp2(x):
    """Return 2^x from one instruction: gl.exp2 takes four more to keep denormals, which are not needed here."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
