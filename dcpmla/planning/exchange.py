"""Time of a layer's exchange: collectives and kernels of `dcpmla.comm.nccl`, counted; `direct` as it was measured."""

from dcpmla.planning.machine import Machine

BACKENDS = ("a2a", "ag_rs", "direct")
_MOST_DIRECT_RANKS = 8  # `comm.direct_ops.MAX_SIZE`, in a module that needs triton: a plan needs none
_ROW_BYTES = 2  # bfloat16 in transit
_LSE_BYTES = 4
_SHARE_BYTES = 4  # ag_rs adds the ranks' rows up in float32
_CANDIDATE_BYTES = 8
_SENT_LSE_BYTES = 16 * _ROW_BYTES  # a2a: an LSE takes 16 elements of the row before it, so that rows stay aligned


def auto_backend(machine: Machine, num_ranks: int, num_nodes: int) -> str:
    """Return the backend that a plan takes for "auto" (`dcpmla.comm.select`): "direct" inside a node of a machine with
    numbers for it, else "a2a".

    Args:
        num_ranks, num_nodes: Size of the DCP group; one rank has "none".
    """
    if num_ranks == 1:
        return "none"
    is_direct = machine.direct is not None and num_nodes == 1 and num_ranks <= _MOST_DIRECT_RANKS
    return "direct" if is_direct else "a2a"


def has_numbers(machine: Machine, backend: str) -> bool:
    """Return whether `ExchangeCosts` can predict a backend, other than "auto"."""
    return backend in BACKENDS and (backend != "direct" or machine.direct is not None)


class ExchangeCosts:
    """The exchange of one DCP group, in a CUDA graph, with rows in bfloat16.

    Args:
        machine: Speeds of the GPUs and their links.
        num_ranks, num_nodes: Size of the DCP group; one rank pays nothing.
        backend: Either "auto" or a backend that the machine `has_numbers` for.

    Attributes:
        backend: Backend that is predicted; the choice of `auto_backend` for "auto".
    """

    def __init__(self, machine: Machine, num_ranks: int, num_nodes: int = 1, backend: str = "a2a") -> None:
        self.machine, self.num_ranks, self.num_nodes = machine, num_ranks, num_nodes
        self.backend = auto_backend(machine, num_ranks, num_nodes) if backend == "auto" else backend

    def time_us(self, operation: str, num_tokens: int, num_heads: int, width: int) -> float:
        """Return the microseconds of one `gather_heads` or `combine`.

        Args:
            operation: Either "gather_heads" or "combine".
            num_heads: Heads of the whole DCP group.
            width: Width of a row: latent + rope for gather_heads, latent for combine.
        """
        machine, num_ranks = self.machine, self.num_ranks
        if num_ranks == 1:
            return 0.0
        num_rows = num_tokens * num_heads
        rows, lse = num_rows * width * _ROW_BYTES, num_rows * _LSE_BYTES
        if self.backend == "direct":  # measured; a rank gets all but its own one of W equal parts of the rows
            assert machine.direct is not None
            return machine.direct.operation_us(operation, rows * (1 - 1 / num_ranks))

        def collective(kind: str, num_bytes: float) -> float:
            """Return the time of a collective with num_bytes in all ranks' chunks together."""
            return machine.collective_us(kind, num_bytes / num_ranks, num_ranks, self.num_nodes)

        def kernel(num_bytes: float) -> float:
            """Return the time of a kernel that reads and writes num_bytes together."""
            return machine.kernel_us + num_bytes / machine.copy_gb_per_s / 1e3

        if operation == "gather_heads":  # then a copy into heads' order, which a single token does not need
            return collective("all_gather", rows) + (kernel(2 * rows) if num_tokens > 1 else 0.0)
        if (
            self.backend == "ag_rs"
        ):  # LSEs gathered, rows weighed and laid out by owner, float32 sums scattered, narrowed
            shares = num_rows * width * _SHARE_BYTES
            weigh = kernel(rows + num_ranks * lse + shares + lse / num_ranks)
            collectives = collective("all_gather", num_ranks * lse) + collective("reduce_scatter", shares)
            return weigh + collectives + kernel((shares + rows) / num_ranks)
        # a2a: rows laid out by owner, then their LSEs; one merge of the own heads' rows
        pack, merge = kernel(2 * rows) + kernel(2 * lse), kernel((rows + lse) * (1 + 1 / num_ranks))
        return pack + collective("all_to_all", rows + num_rows * _SENT_LSE_BYTES) + merge

    def candidates_us(self, num_tokens: int, num: int) -> float:
        """Return the microseconds of one `gather_candidates` of `num` a token and rank: they move as the rows of
        `gather_heads` do, one a rank.
        """
        return self.time_us("gather_heads", num_tokens, self.num_ranks, num * _CANDIDATE_BYTES // _ROW_BYTES)
