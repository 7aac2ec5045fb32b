"""The protocol of one-sided exchanges: ranks store into their peers' memory, and wait for stores into their own.

Data is its own flag. A landing, the part of a rank's memory that receives rows, has all bits set (as integers -1, as
rows a NaN that no kernel computes) until a peer's element arrives; the thread that reads an element resets it to -1. So
only rows are sent, 16 bytes a thread, and no fence is needed: each element has arrived or not. A value that many
threads read (an LSE, a scale) is sent in a word of 8 bytes, together with the number of the exchange, its epoch.

Each rank has two landings, which exchanges use in turn. A peer writes into a landing again two exchanges later, after
it has completed the exchange in between. That exchange needed data from this rank, sent after this rank's kernel of the
landing's last exchange had ended. So the landing is free without a signal. Epochs are counted on the device, so that
replays of CUDA graphs and eager calls may follow each other.

A program is one warp, whose threads read the same values and the same clock. (With several warps, one could keep
waiting while another gives up.)

Source: the protocol "Lamport" of TensorRT-LLM's all-reduce (two landings suffice where its sums need three); words as
in NCCL's LL.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

NUM_PROGRAMS = 2048  # maximum per launch: each program reads the epoch from a counter of its own
_COUNTERS = tl.constexpr(32)  # that a program updates at once, one a thread
_FP8_MAX = tl.constexpr(448.0)  # largest number of e4m3


@triton.jit
def now():
    """Return the time in nanoseconds."""
    return globaltimer()


@triton.jit
def next_epoch(state_ptr):
    """Return the number of this exchange."""
    return tl.load(state_ptr + tl.program_id(0)) + 1


@triton.jit
def count_exchange(epoch, state_ptr, limit, PROGRAMS: tl.constexpr):
    """Count this exchange, and return its deadline.

    Kernels over landings call this after they have stored their rows, so that the stores need not wait for it. A
    program updates its own counter, and its share of the counters that only larger launches use. After a fault no
    exchange waits.
    """
    tl.debug_barrier()  # all warps must have loaded the epoch before any warp updates it
    count, step = tl.zeros([_COUNTERS], tl.int32) + epoch, tl.num_programs(0)
    # A loop, because a share as a constant would make a variant of each kernel for each number of programs.
    for first in range(tl.program_id(0), PROGRAMS, step * _COUNTERS):
        counter = first + step * tl.arange(0, _COUNTERS)
        tl.store(state_ptr + counter, count, mask=counter < PROGRAMS)
    has_failed = tl.load(state_ptr + PROGRAMS)
    return now() + tl.where(has_failed != 0, 0, tl.cast(limit, tl.int64) * 1000000)


@triton.jit
def give_up(is_missing, peer, epoch, operation, state_ptr, fault_ptr, PROGRAMS: tl.constexpr):
    """Report to the host the first rank [N] whose data is missing. Only the first fault is recorded."""
    first = tl.min(tl.where(is_missing, peer, 255), 0)
    if (tl.atomic_cas(state_ptr + PROGRAMS, 0, 1) == 0) & (tl.load(fault_ptr) == 0):
        tl.store(fault_ptr, (epoch.to(tl.int64) << 32) | (first << 8) | operation)


@triton.jit
def find_landing(epoch, landing_bytes):
    """Return the offsets in bytes of this exchange's rows and of its words in each rank's memory.

    The rows of both landings come first, then the words of both.
    """
    return (epoch & 1) * landing_bytes, 2 * landing_bytes + (epoch & 1) * (landing_bytes // 8)


@triton.jit
def row_in_landing(rank, num_rows, row):
    """Return the index of a rank's row in a landing, where each rank has num_rows rows."""
    return rank * num_rows + row


@triton.jit
def peer_addresses(addresses_ptr, offset, peer, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Return pointers to an offset in the memory of each rank [N]."""
    address = tl.load(addresses_ptr + peer, mask=peer < SIZE, other=0) + offset
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), [16])  # the compiler cannot infer it


@triton.jit
def own_address(addresses_ptr, rank, offset, dtype: tl.constexpr):
    """Return a pointer to an offset in the memory of one rank."""
    return tl.multiple_of((tl.load(addresses_ptr + rank) + offset).to(tl.pointer_type(dtype)), 16)


@triton.jit
def as_word(value, epoch):
    """Pack a float32 and the epoch into a word."""
    value = tl.cast(value, tl.float32).to(tl.int32, bitcast=True)
    return (value.to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)


@triton.jit
def read_words(words, is_peer, nothing, epoch):
    """Read words of an exchange [N], as integers: -1 for a word that has not arrived, `nothing` for no peer.

    Every thread of the warp loads a word, because with fewer loads than threads the compiler repeats the load at each
    use, and words may arrive in between.
    """
    repeat: tl.constexpr = 32 // words.shape[0] if words.shape[0] < 32 else 1
    at = tl.broadcast_to(words[:, None], [words.shape[0], repeat])
    word = tl.load(at, mask=is_peer[:, None], other=as_word(nothing, epoch), volatile=True)
    return tl.max(tl.where((word >> 32) == epoch, word & 0xFFFFFFFF, -1), 1)


@triton.jit
def as_float(value):
    """Return the float32 of a word from `read_words`."""
    return value.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def quantize(x, type: tl.constexpr, IS_FP8: tl.constexpr):
    """Return rows [N, M], stored as integers, as they are sent, and the scales [N] that multiply them on arrival.

    Scales are 1 unless rows are sent as e4m3.
    """
    if IS_FP8:
        wide = x.to(type, bitcast=True).to(tl.float32)
        scale = tl.max(tl.abs(wide), 1) / _FP8_MAX
        scale = tl.where(scale > 0, scale, 1.0)
        x = (wide / scale[:, None]).to(tl.float8e4nv).to(tl.int8, bitcast=True)
    else:
        scale = tl.full([x.shape[0]], 1.0, tl.float32)
        x = tl.where(x == -1, -2, x)  # both are NaN; e4m3's NaN differs
    return x, scale


@triton.jit
def dequantize(x, scale, type: tl.constexpr, IS_FP8: tl.constexpr):
    """Return the float32 values of rows from `quantize`."""
    wide = x.to(tl.float8e4nv if IS_FP8 else type, bitcast=True).to(tl.float32)
    return wide * scale[:, None] if IS_FP8 else wide
