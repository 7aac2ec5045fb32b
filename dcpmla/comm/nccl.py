"""Exchange by collectives of torch.distributed: NCCL between GPUs, gloo between CPUs.

Correct everywhere, also across nodes.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as functional

from dcpmla.comm.exchange import pairs
from dcpmla.merge import merge_tree, partial_weights, weigh_partial
from dcpmla.operators import is_on_gpu, operator
from dcpmla.parallel.collectives import all_gather, named

_ROW_ALIGNMENT = 16  # elements; Triton vectorizes loads only if it knows that a stride is a multiple of this
# See `parallel.collectives.all_gather`.
_start_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _CollectiveExchange:
    """The part that both backends share: heads and context by all-gather."""

    name: str
    fault = None

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def gather_heads(self, q: Tensor) -> Tensor:
        return all_gather(pairs(q), self.group, "gather_heads").transpose(0, 1).flatten(1, 2).view(q.dtype)

    def gather_candidates(self, candidates: Tensor) -> Tensor:
        return all_gather(candidates, self.group, "gather_candidates").transpose(0, 1)

    def mailbox(self, num_tokens: int, num_heads: int, width: int, dtype: torch.dtype) -> None:
        return None

    def start_context(self, rows: Tensor, order: Tensor, tokens: Tensor) -> Callable[[], Tensor]:
        # torch.compile traces functional collectives, but no handles of other asynchronous ones. They keep both tensors
        # until the wait.
        with named("gather_context", self.group):
            gathered = _start_all_gather(pairs(rows).contiguous(), 0, self.group)

        def finish() -> Tensor:
            with named("gather_context", self.group):
                rows_of_all = functional.wait_tensor(gathered)
            return rows_of_all[order].view(rows.dtype)

        return finish

    def reserve_context(self, num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        # Rows in token order, and the next rows in transit: this rank's, and all ranks'.
        torch.empty(2 * num_tokens + -(-num_tokens // self.size), width, dtype=dtype, device=device)

    def check(self) -> None:
        pass  # a failed collective ends its rank, or raises at the call


class AllGatherReduceScatter(_CollectiveExchange):
    """Exchange `ag_rs`: all-gather of LSEs, then reduce-scatter of the weighted rows over the heads, in float32."""

    name = "ag_rs"

    def combine(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        shares, merged_lse = weigh_rows(out, all_gather(lse, self.group, "combine"), self.rank)
        merged = torch.empty_like(shares[0])
        with named("combine", self.group):
            _reduce_scatter(merged, shares.flatten(0, 1), group=self.group)
        return merged.to(out.dtype), merged_lse


class AllToAll(_CollectiveExchange):
    """Exchange `a2a`: one all-to-all of rows, each followed by its LSE, to the owners of the heads, which merge in
    float32 by a fixed tree.
    """

    name = "a2a"

    def combine(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        num_tokens, num_heads, width = out.shape
        if out.element_size() > lse.element_size():
            raise ValueError(f"out has dtype {out.dtype}; a2a carries rows of float32 or narrower")
        unit = _ROW_ALIGNMENT * out.element_size() // lse.element_size()  # words of float32
        row_words = -(-width // _ROW_ALIGNMENT) * unit
        sent = lse.new_empty(self.size, num_tokens, num_heads // self.size, row_words + unit)
        received = torch.empty_like(sent)
        _rows(sent, out.dtype, width).copy_(_by_owner(out, self.size))
        sent[..., row_words].copy_(_by_owner(lse, self.size))
        with named("combine", self.group):
            dist.all_to_all_single(received, sent, group=self.group)
        return merge_rows(_rows(received, out.dtype, width), received[..., row_words])


def _by_owner(tensor: Tensor, size: int) -> Tensor:
    """View [T, W h, ...] as [W, T, h, ...]: the rows of each owner."""
    return tensor.unflatten(1, (size, -1)).transpose(0, 1)


def _rows(buffer: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """View the rows [..., width] in a float32 buffer [..., words]."""
    return buffer.view(dtype)[..., :width]


def _empty_shares(out: Tensor, lse: Tensor, _rank: int) -> tuple[Tensor, Tensor]:
    size, num_tokens, num_heads = lse.shape[0], out.shape[0], out.shape[1] // lse.shape[0]
    dtype = torch.promote_types(out.dtype, torch.float32)
    return out.new_empty(size, num_tokens, num_heads, out.shape[2], dtype=dtype), lse.new_empty(num_tokens, num_heads)


@operator(
    "weigh_rows",
    kernel="dcpmla.comm.kernels.merge:weigh_rows",
    fake=_empty_shares,
    runs=is_on_gpu,
)
def weigh_rows(out: Tensor, lse: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Weigh one rank's rows, so that their sum over the ranks is the merge.

    Args:
        out: Partial output [T, W h, D] of this rank; rows whose lse is -inf are ignored.
        lse: Log-sum-exp [W, T, W h] float32 of all ranks.
    Returns:
        Rows [W, T, h, D] by owner, times their shares of the merged rows, in float32 (float64 stays); the merged LSE
        [T, h] of this rank's heads.
    """
    shares, merged_lse = weigh_partial(out, partial_weights(lse)[rank]), lse.logsumexp(0)
    shares, merged_lse = _by_owner(shares, len(lse)), _by_owner(merged_lse, len(lse))[rank]
    return shares.contiguous(), merged_lse.clone(memory_format=torch.contiguous_format)  # not a view


@operator(
    "merge_rows",
    kernel="dcpmla.comm.kernels.merge:merge_rows",
    fake=lambda out, lse: (out.new_empty(out.shape[1:]), lse.new_empty(lse.shape[1:])),
    runs=is_on_gpu,
)
def merge_rows(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the ranks' rows by `merge_tree`, in float32 at least, on a GPU in one kernel.

    Args:
        out: Partial outputs [W, T, h, D]; rows whose lse is -inf are ignored.
        lse: Log-sum-exp [W, T, h] float32.
    Returns:
        Merged out [T, h, D] in its dtype, rounded once, and lse [T, h].
    """
    merged, merged_lse = merge_tree(out.to(torch.promote_types(out.dtype, torch.float32)), lse)
    return merged.to(out.dtype, copy=True), merged_lse.clone()  # rows of one rank are views of the arguments
