"""Exchange by collectives of torch.distributed: NCCL between GPUs, gloo between CPUs. Correct everywhere, also across nodes."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dcpmla.merge import merge_partials, partial_weights, weigh_partial
from dcpmla.parallel.collectives import named

_ROW_ALIGNMENT = 16  # elements: what Triton must know of a stride to load more than one of them at a time
# torch 2.13 renamed the collectives over one tensor, and warns about the only names that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _CollectiveExchange:
    """What both backends share: heads and context by all-gather."""

    name: str

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def gather_heads(self, q: Tensor) -> Tensor:
        return self._all_gather(q, "gather_heads").transpose(0, 1).flatten(1, 2)

    def gather_context(self, rows: Tensor, order: Tensor) -> Tensor:
        return self._all_gather(rows, "gather_context").flatten(0, 1)[order]

    def _all_gather(self, tensor: Tensor, operation: str) -> Tensor:
        """[...] of each rank -> [W, ...]."""
        gathered = tensor.new_empty(self.size, *tensor.shape)
        with named(operation, self.group):
            _all_gather(gathered.flatten(0, 1), tensor.contiguous(), group=self.group)
        return gathered

    def _by_owner(self, tensor: Tensor) -> Tensor:
        """[T, W h, ...] -> a view [W, T, h, ...]: what goes to each owner."""
        return tensor.unflatten(1, (self.size, -1)).transpose(0, 1)


class AllGatherReduceScatter(_CollectiveExchange):
    """`ag_rs`: all-gather the LSEs, weigh the own rows, reduce-scatter them over the heads in float32."""

    name = "ag_rs"

    def combine(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        all_lse = self._all_gather(lse, "combine")
        shares = self._by_owner(weigh_partial(out, partial_weights(all_lse)[self.rank])).contiguous()
        merged = torch.empty_like(shares[0])
        with named("combine", self.group):
            _reduce_scatter(merged, shares.flatten(0, 1), group=self.group)
        return merged.to(out.dtype), all_lse.logsumexp(0).unflatten(1, (self.size, -1))[:, self.rank].contiguous()


class AllToAll(_CollectiveExchange):
    """`a2a`: send every owner its heads' rows with their LSE behind them, in one collective; each owner merges in float32."""

    name = "a2a"

    def combine(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        num_tokens, num_heads, width = out.shape
        if out.element_size() > lse.element_size():
            raise ValueError(f"out has dtype {out.dtype}; a2a carries rows of float32 or narrower")
        unit = _ROW_ALIGNMENT * out.element_size() // lse.element_size()  # words of float32
        row_words = -(-width // _ROW_ALIGNMENT) * unit
        sent = lse.new_empty(self.size, num_tokens, num_heads // self.size, row_words + unit)
        received = torch.empty_like(sent)
        _rows(sent, out.dtype, width).copy_(self._by_owner(out))
        sent[..., row_words].copy_(self._by_owner(lse))
        with named("combine", self.group):
            dist.all_to_all_single(received, sent, group=self.group)
        return _merge(_rows(received, out.dtype, width), received[..., row_words])


def _rows(buffer: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """The rows [..., width] in a float32 buffer [..., words]."""
    return buffer.view(dtype)[..., :width]


@torch.library.custom_op("dcpmla::merge_rows", mutates_args=())
def _merge(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """`merge_partials`, on a GPU as one kernel."""
    if not out.is_cuda:
        return merge_partials(out, lse)
    from dcpmla.comm.kernels import merge_rows  # triton is there on Linux only

    return merge_rows(out, lse)


@_merge.register_fake
def _(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out.new_empty(out.shape[1:]), lse.new_empty(lse.shape[1:])
