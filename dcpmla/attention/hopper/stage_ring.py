"""Rings of stages between the warps of a program, and descriptors of tiles for TMA; all Hopper kernels use both.

A ring is a buffer in shared memory with several stages, which producers fill and consumers read in turn. Two mbarriers
per stage synchronize them: `ready` completes a phase when the stage is filled, `free` when all its consumers have read
it. Each role counts its uses of a ring: use n is of stage n % stages, and the parity of n // stages is the phase to
wait for. The counts are the same in all threads (`schedule.uniform`), and so are the addresses of stages: else the
tensor cores would wait for them.
"""

from functools import cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dcpmla.attention.hopper.compat import aggregate

_SWIZZLE_BYTES = 128  # largest swizzle


@aggregate
class Ring:
    """mbarriers of the stages of a ring."""

    ready: gl.shared_memory_descriptor  # [stages]
    free: gl.shared_memory_descriptor


@gluon.jit
def allocate_mbarriers(number: gl.constexpr, count: gl.constexpr):
    """Allocate mbarriers of `count` arrivals a phase."""
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(number):
        mbarrier.init(barriers.index(index), count=count)
    return barriers


@gluon.jit
def new_ring(NUM_STAGES: gl.constexpr, NUM_FILLED: gl.constexpr, NUM_READ: gl.constexpr):
    """Allocate a ring's mbarriers, by the numbers of arrivals that fill a stage and that free it."""
    return Ring(allocate_mbarriers(NUM_STAGES, NUM_FILLED), allocate_mbarriers(NUM_STAGES, NUM_READ))


@gluon.jit
def ready_at(ring, use):
    """Return the mbarrier that a producer's use of a ring arrives at."""
    return ring.ready.index(use % ring.ready.shape[0])


@gluon.jit
def free_at(ring, use):
    """Return the mbarrier that a consumer's use of a ring arrives at."""
    return ring.free.index(use % ring.free.shape[0])


@gluon.jit
def await_ready(ring, use):
    """Wait until producers have filled a use's stage; return the stage."""
    stage = use % ring.ready.shape[0]
    mbarrier.wait(ring.ready.index(stage), (use // ring.ready.shape[0]) & 1)
    return stage


@gluon.jit
def await_free(ring, use):
    """Wait until consumers have read the stage before this use of it; return the stage."""
    stage = use % ring.free.shape[0]
    mbarrier.wait(ring.free.index(stage), (use // ring.free.shape[0]) & 1 ^ 1)
    return stage


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


def describe(matrix: Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    """Describe a matrix for TMA, in swizzled tiles [num_rows, num_columns]."""
    layout = _tile_layout(num_columns, matrix.element_size())
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [num_rows, num_columns], layout)


@cache
def _tile_layout(num_columns: int, element_size: int) -> gl.NVMMASharedLayout:
    """Return the layout of tiles in shared memory, which takes longer to build than a descriptor."""
    swizzle = min(_SWIZZLE_BYTES, num_columns * element_size)
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * element_size, rank=2)
