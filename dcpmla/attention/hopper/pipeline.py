"""The pipeline between the warps of a decode program: tiles in shared memory, and the rings that synchronize them.

The unit of work is a segment: the tiles of one request in a part. Each role, a producer or a consumer, iterates over
the segments of its part (`schedule.Walk`) and synchronizes with other roles by rings.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from dcpmla.attention.hopper.compat import aggregate
from dcpmla.attention.hopper.schedule import HALF, KEYS, ROPE, ROWS
from dcpmla.attention.hopper.stage_ring import Ring, allocate_mbarriers, await_ready, new_ring, stage_of

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
    """Rings of the tiles of `Buffers`; the queries' has one stage, refilled for each segment.

    The two of `merge_ready` open when a part's first request, and its last, can be merged. They are None where nothing
    is merged: Triton gives the memory of an mbarrier that no role uses to other data, and the mbarrier may still be
    written then.
    """

    queries: Ring
    left: Ring
    right: Ring
    probs: Ring
    merge_ready: gl.base_value


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
def new_barriers(
    NUM_STAGES: gl.constexpr,
    NUM_PROBS: gl.constexpr,
    Q_CONSUMERS: gl.constexpr,
    PROBS_CONSUMERS: gl.constexpr,
    IS_MERGED: gl.constexpr,
):
    """Allocate the mbarriers of a program, by the numbers of roles that read its queries and probabilities."""
    queries = new_ring(1, 1, Q_CONSUMERS)
    left, right = new_ring(NUM_STAGES, 1, 1), new_ring(NUM_STAGES, 1, 1)
    probs = new_ring(NUM_PROBS, 1, PROBS_CONSUMERS)
    merge_ready = None
    if IS_MERGED:
        merge_ready = allocate_mbarriers(2, 1)
    fence_async_shared()
    return Barriers(queries, left, right, probs, merge_ready)


@gluon.jit
def _multiply(queries, keys, stage, scores):
    """Start one of the products."""
    return warpgroup_mma(stage_of(queries), stage_of(keys, stage).permute((1, 0)), scores, is_async=True)


@gluon.jit
def start_scores(buffers, barriers, tile, layout: gl.constexpr):
    """Start the queries' asynchronous products with the pieces of a tile of keys; return the pending scores."""
    scores = gl.zeros([ROWS, KEYS], gl.float32, layout)
    stage = await_ready(barriers.left, tile)
    scores = _multiply(buffers.q_left, buffers.k_left, stage, scores)
    if buffers.k_pe is not None:
        scores = _multiply(buffers.q_pe, buffers.k_pe, stage, scores)
    await_ready(barriers.right, tile)
    return _multiply(buffers.q_right, buffers.k_right, stage, scores)


@gluon.jit
def exp2(x):
    """Return 2^x from one instruction: gl.exp2 takes four more to keep denormals, which are not needed here."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def seen_by_rows(row, segment, lens_ptr, num_heads):
    """Return each row's number of visible keys, and the number of keys that are visible to all rows of the tile."""
    token = (segment.first_row + row) // num_heads
    num_seen = gl.load(lens_ptr + token, mask=row < segment.num_rows, other=0)
    return num_seen, gl.load(lens_ptr + segment.first_row // num_heads)


@gluon.jit
def softmax_step(scores, first_key, seen, scale, peak, SHIFT: gl.constexpr):
    """Take a tile's step of the online softmax.

    Returns the probabilities times 2^SHIFT, the factor of earlier sums, and the new peak.
    """
    num_seen, num_seen_by_all = seen
    if first_key + KEYS > num_seen_by_all:
        key = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(gl.expand_dims(num_seen, 1) > gl.expand_dims(key, 0), scores, -float("inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1))
    shift = gl.where(new_peak == -float("inf"), 0.0, new_peak) * scale  # -inf - -inf is NaN
    factor = exp2(peak * scale - shift)
    if SHIFT != 0.0:
        shift = shift - SHIFT
    return exp2(scores * scale - gl.expand_dims(shift, 1)), factor, new_peak
