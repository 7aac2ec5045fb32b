"""The size of the cache, by the needs of the sequences and by a rank's memory."""

from collections.abc import Sequence
from dataclasses import replace

import psutil
import torch
import torch.distributed as dist

from dcpmla.cache.plan import CachePlan
from dcpmla.cache.states import num_states
from dcpmla.integrations.decode_graphs import GraphMaker
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.sharded_model import ShardedModel

_EMPTY_BLOCK_BYTES = 4096  # assumed size of a block in a model with only windows, which store nothing in blocks


def plan_cache(
    model: ShardedModel, seq_lens: Sequence[int] | None, num_bytes: int, num_running: int, num_drafts: int
) -> CachePlan:
    """Plan the blocks that the sequences need together, or that fit on the rank with the least memory, and states, if
    the model has them, of all requests that may run and of some remembered ones.
    """
    lens = list(seq_lens) if seq_lens else [1]
    plan = model.attention.plan_cache(model.placement.dcp, lens, model.dtype, num_states(num_running), num_drafts)
    block_bytes = plan.bytes_per_block or _EMPTY_BLOCK_BYTES
    state_bytes = plan.num_states * plan.bytes_per_state
    affordable = torch.tensor(max(0, num_bytes - state_bytes) // block_bytes, device=model.device)
    dist.all_reduce(affordable, op=dist.ReduceOp.MIN, group=model.placement.mesh.tp_group)
    longest = -(-max(lens) // plan.block_tokens) * block_bytes
    if int(affordable) * block_bytes < longest:
        states = f" beside {state_bytes:,} for the states of {plan.num_states} requests" if plan.num_states else ""
        fewer = "let fewer requests run (--max-num-seqs), " if plan.num_states else ""
        raise ValueError(
            f"cache: the longest sequence, {max(lens):,} tokens, needs {longest:,} bytes a rank, but there is room for "
            f"{int(affordable) * block_bytes:,}{states}; shorten it (--max-model-len, --max-new-tokens), {fewer}"
            f"raise --kv-cache-memory-bytes, or shard over more ranks (-dcp)"
        )
    return replace(plan, num_blocks=min(plan.num_blocks, int(affordable)) if seq_lens else int(affordable))


def free_bytes(model: ShardedModel, options: EngineOptions, num_local_ranks: int, graphs: Sequence[GraphMaker]) -> int:
    """Return this rank's bytes for the cache: the usable memory, less the needs of the largest step and of graphs."""
    utilization, num_tokens = options.gpu_memory_utilization, options.max_num_batched_tokens
    if model.device.type == "cpu":
        return int(psutil.virtual_memory().available * utilization / num_local_ranks)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    model.profile(num_tokens, min(num_tokens, options.max_num_seqs))
    step_bytes = torch.cuda.max_memory_allocated(model.device) - before
    graph_bytes = sum(maker.measure() for maker in graphs)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return max(0, free - step_bytes - graph_bytes - int(total * (1 - utilization)))
