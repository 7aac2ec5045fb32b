"""Time of a layer's exchange: collectives and kernels of `dcpmla.comm.nccl`, counted; `direct` as it was measured."""

from dataclasses import dataclass

from dcpmla.planning.machine import Machine

BACKENDS = ("a2a", "ag_rs", "direct")
_MOST_DIRECT_RANKS = 8  # `comm.direct.MAX_SIZE`, in a module that needs triton: a plan needs none
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
    """Return whether `exchange_us` can predict a backend, other than "auto"."""
    return backend in BACKENDS and (backend != "direct" or machine.direct is not None)


def exchange_us(
    machine: Machine,
    operation: str,
    num_tokens: int,
    num_heads: int,
    width: int,
    num_ranks: int,
    num_nodes: int = 1,
    backend: str = "a2a",
) -> float:
    """Return the microseconds of one `gather_heads` or `combine` in a CUDA graph, bfloat16 rows.

    Args:
        operation: Either "gather_heads" or "combine".
        num_heads: Heads of the whole DCP group.
        width: Width of a row: latent + rope for gather_heads, latent for combine.
        num_ranks, num_nodes: Size of the DCP group; one rank pays nothing.
        backend: Either "auto" or a backend that the machine `has_numbers` for.
    """
    if num_ranks == 1:
        return 0.0
    if backend == "auto":
        backend = auto_backend(machine, num_ranks, num_nodes)
    exchange = _Exchange(machine, num_tokens, num_heads, width, num_ranks, num_nodes)
    if backend == "direct":
        return exchange.direct(operation)
    if operation == "gather_heads":
        return exchange.gather_heads()
    return exchange.combine_ag_rs() if backend == "ag_rs" else exchange.combine_a2a()


def candidates_us(
    machine: Machine, num_tokens: int, num: int, num_ranks: int, num_nodes: int = 1, backend: str = "a2a"
) -> float:
    """Return the microseconds of one `gather_candidates` of `num` a token and rank: they move as the rows of
    `gather_heads` do, one a rank.
    """
    width = num * _CANDIDATE_BYTES // _ROW_BYTES
    return exchange_us(machine, "gather_heads", num_tokens, num_ranks, width, num_ranks, num_nodes, backend)


@dataclass(frozen=True)
class _Exchange:
    """One exchange. Its operations return microseconds; the bytes of a kernel count its reads and its writes."""

    machine: Machine
    num_tokens: int
    num_heads: int
    width: int
    num_ranks: int
    num_nodes: int

    def gather_heads(self) -> float:
        """Count an all-gather, then a copy into heads' order; a single token needs no copy."""
        copy = self._kernel(2 * self._rows(_ROW_BYTES)) if self.num_tokens > 1 else 0.0
        return self._collective("all_gather", self._rows(_ROW_BYTES)) + copy

    def combine_a2a(self) -> float:
        """Count rows laid out by owner, their LSEs after them, an all-to-all, one merge of the own heads' rows."""
        rows, lse = self._rows(_ROW_BYTES), self._lse(_LSE_BYTES)
        pack = self._kernel(2 * rows) + self._kernel(2 * lse)
        merge = self._kernel((rows + lse) * (1 + 1 / self.num_ranks))
        return pack + self._collective("all_to_all", rows + self._lse(_SENT_LSE_BYTES)) + merge

    def combine_ag_rs(self) -> float:
        """Count LSEs all-gathered, rows weighed and laid out by owner, a reduce-scatter in float32, sums narrowed."""
        rows, shares, lse = self._rows(_ROW_BYTES), self._rows(_SHARE_BYTES), self._lse(_LSE_BYTES)
        weigh = self._kernel(rows + self.num_ranks * lse + shares + lse / self.num_ranks)
        narrow = self._kernel((shares + rows) / self.num_ranks)
        return (
            self._collective("all_gather", self.num_ranks * lse)
            + weigh
            + self._collective("reduce_scatter", shares)
            + narrow
        )

    def direct(self, operation: str) -> float:
        """Return the measured time: a rank gets all but its own one of W equal parts of the group's rows."""
        assert self.machine.direct is not None
        return self.machine.direct.operation_us(operation, self._rows(_ROW_BYTES) * (1 - 1 / self.num_ranks))

    def _rows(self, element_bytes: int) -> int:
        return self.num_tokens * self.num_heads * self.width * element_bytes

    def _lse(self, element_bytes: int) -> int:
        return self.num_tokens * self.num_heads * element_bytes

    def _collective(self, kind: str, num_bytes: float) -> float:
        """Return the time of a collective with num_bytes in all ranks' chunks together."""
        return self.machine.collective_us(kind, num_bytes / self.num_ranks, self.num_ranks, self.num_nodes)

    def _kernel(self, num_bytes: float) -> float:
        return self.machine.kernel_us + num_bytes / self.machine.copy_gb_per_s / 1e3
