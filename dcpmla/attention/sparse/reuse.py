"""A step of sparse MLA whose selection another indexer has made: of an engine's own, or of a layer in another step."""

from dataclasses import replace

from torch import Tensor

from dcpmla.attention.pooled.expand import expand_pools
from dcpmla.attention.sparse.slots import SlotLayout
from dcpmla.attention.sparse.step import SelectedTokens, SparseMetadata, check_positions
from dcpmla.attention.step import StepMetadata
from dcpmla.config import DCPConfig


def with_selected(step: StepMetadata, positions: Tensor, dcp: DCPConfig, dcp_rank: int) -> StepMetadata:
    """Return the step with a selection that has been made; layers with skip_topk attend to it.

    Args:
        step: Step of a `SparseStepBuilder`; returned unchanged where no token has more than topk before it.
        positions: Positions in the tokens' requests [at least T, topk] int32, none twice, -1 after the last, the same
            on all ranks of the DCP group; read now. A token with at most topk tokens before and with it lists all.
        dcp, dcp_rank: Layout of the cache, and this rank's part of it.
    Raises:
        ValueError: The step is not sparse, or positions are not such a tensor.
    """
    sparse = step.get(SparseMetadata)
    if sparse is None:
        raise ValueError("step has no sparse part; build it with a SparseStepBuilder")
    topk = positions.shape[-1]
    check_positions(positions, step, topk)
    if sparse.max_seq_len <= topk:
        return step
    rank = dcp_rank, dcp.decode_context_parallel_size, dcp.cp_kv_cache_interleave_size
    layout = SlotLayout(sparse.block_table, sparse.request, dcp.block_size, *rank)
    selection = SelectedTokens.empty(step.num_tokens, topk, positions.device)
    memory = selection.positions, selection.slots, selection.num_slots
    expand_pools(positions[: step.num_tokens], sparse.seq_lens, 1, layout, *memory)  # pools of one token
    return step.with_kind(replace(sparse, selection=selection))
