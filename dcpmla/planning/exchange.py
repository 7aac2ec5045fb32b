"""What a layer pays for its exchange: the collectives and kernels of `dcpmla.comm.nccl`, counted."""

from collections.abc import Callable

from dcpmla.planning.machine import Machine

_ROW_BYTES = 2  # bfloat16 in transit
_LSE_BYTES = 4
_AG_RS_KERNELS, _AG_RS_PASSES = 20, 8  # torch's kernels around ag_rs's collectives, and how often they pass over the float32 rows


def exchange_us(
    machine: Machine, operation: str, num_tokens: int, num_heads: int, width: int, num_ranks: int, num_nodes: int = 1, backend: str = "a2a"
) -> float:
    """Microseconds of one `gather_heads` or `combine` in a CUDA graph, bfloat16 rows.

    Args:
        operation: "gather_heads" or "combine".
        num_heads: of the whole DCP group.
        width: of a row: latent + rope for gather_heads, latent for combine.
        num_ranks, num_nodes: of the DCP group; one rank pays nothing.
        backend: "a2a" (what "auto" takes) or "ag_rs".
    """
    if num_ranks == 1:
        return 0.0
    row_bytes = num_tokens * num_heads * width * _ROW_BYTES
    lse_bytes = num_tokens * num_heads * _LSE_BYTES
    cost = {"gather_heads": _gather_heads, "combine": _combine_ag_rs if backend == "ag_rs" else _combine_a2a}[operation]
    return cost(
        lambda kind, total: machine.collective_us(kind, total / num_ranks, num_ranks, num_nodes), machine, row_bytes, lse_bytes, num_ranks
    )


def exchange_kind(operation: str, backend: str) -> str | None:
    """The collective that an operation's time speaks of; None where several mix."""
    if operation == "gather_heads":
        return "all_gather"
    return "all_to_all" if backend == "a2a" else None


_Collective = Callable[[str, float], float]  # (kind, bytes of all ranks' chunks) -> microseconds


def _gather_heads(collective: _Collective, machine: Machine, row_bytes: int, lse_bytes: int, num_ranks: int) -> float:
    """All-gather, then a copy into heads' order."""
    return collective("all_gather", row_bytes) + _kernel_us(machine, 2 * row_bytes)


def _combine_a2a(collective: _Collective, machine: Machine, row_bytes: int, lse_bytes: int, num_ranks: int) -> float:
    """Rows packed by owner, LSEs packed, all-to-all (an LSE takes 16 bytes: rows stay aligned), one merge."""
    pack = _kernel_us(machine, 2 * row_bytes) + _kernel_us(machine, 2 * lse_bytes)
    merge = _kernel_us(machine, row_bytes + row_bytes / num_ranks)
    return pack + collective("all_to_all", row_bytes + 4 * lse_bytes) + merge


def _combine_ag_rs(collective: _Collective, machine: Machine, row_bytes: int, lse_bytes: int, num_ranks: int) -> float:
    """LSEs all-gathered, rows weighed in float32, reduce-scatter in float32."""
    float_bytes = row_bytes / _ROW_BYTES * 4
    kernels = _AG_RS_KERNELS * machine.kernel_us + _AG_RS_PASSES * float_bytes / machine.copy_gb_per_s / 1e3
    return collective("all_gather", lse_bytes * num_ranks) + kernels + collective("reduce_scatter", float_bytes)


def _kernel_us(machine: Machine, num_bytes: float) -> float:
    return machine.kernel_us + num_bytes / machine.copy_gb_per_s / 1e3
