"""DeepSeek-V4's attention in an engine of one's own: a layer of each kind in a row, with random weights.

    torchrun --standalone --nproc-per-node 4 examples/compressed_layer.py

or, as one process, `python examples/compressed_layer.py`. Groups, projections, angles and block tables are the
engine's. Any number of ranks that divides the groups of heads prints the same.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from dcpmla import DCPConfig, DCPMesh, IndexerConfig, Placement, select_exchange
from dcpmla.attention.layers.compressed.cache import CompressedCache, plan_compressed
from dcpmla.attention.layers.compressed.config import CompressedConfig, LayerKind
from dcpmla.attention.layers.compressed.step import compressed_traits, with_angles
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.comm.faults import StepFaults
from dcpmla.integrations.external.compressed import CompressedModules, CompressorModules, ExternalCompressedAttention
from dcpmla.integrations.external.indexer import rotated_first
from dcpmla.job.bootstrap import distributed, read_launcher

HIDDEN, HEADS, WIDTH, ROPE, Q_RANK, GROUPS, O_RANK = 128, 16, 32, 16, 64, 8, 16
INDEX_HEADS, INDEX_WIDTH, TOPK = 4, 32, 6
CONFIG = CompressedConfig(
    hidden_size=HIDDEN,
    num_heads=HEADS,
    head_dim=WIDTH,
    rope_dim=ROPE,
    q_lora_rank=Q_RANK,
    o_groups=GROUPS,
    o_lora_rank=O_RANK,
    sliding_window=8,
    rms_norm_eps=1e-6,
    indexer=IndexerConfig(num_heads=INDEX_HEADS, head_dim=INDEX_WIDTH, topk=TOPK, rope_interleaved=True),
    # Windows alone; entries of 4 tokens that an indexer selects; entries of 16 tokens, all read.
    layer_kinds=(LayerKind(0, False), LayerKind(4, True), LayerKind(16, False)),
)
PROMPT_LEN, SEQ_LEN, BLOCK_SIZE, MAX_TOKENS = 60, 68, 4, 80


def draw(*shape: int) -> Tensor:
    return torch.randn(shape) / 8


def my_compressor(ratio: int, columns: int, width: int, device: torch.device) -> CompressorModules:
    # An indexer's bias is drawn in the kernels' order; one of a checkpoint passes through rotated_first, as its norm.
    return CompressorModules(bias=draw(ratio, columns).to(device), norm=torch.ones(width, device=device))


def my_modules(kind: LayerKind, group: dist.ProcessGroup, device: torch.device) -> CompressedModules:
    """Draw all heads' weights, the same on all ranks, and return the projections of this rank's heads."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sizes = ((HEADS * WIDTH, Q_RANK), (GROUPS, O_RANK, HEADS // GROUPS * WIDTH), (HIDDEN, GROUPS * O_RANK), (HEADS,))
    q_b, o_a, o_b, sinks = (draw(*shape).to(device) for shape in sizes)
    q_b, o_a, o_b = q_b.chunk(size)[rank], o_a.chunk(size)[rank], o_b.chunk(size, dim=1)[rank]
    num_halves = CONFIG.num_halves(kind)
    columns, index_columns = num_halves * WIDTH, num_halves * INDEX_WIDTH
    w_row = draw(Q_RANK + WIDTH, HIDDEN).to(device)
    w_entries, w_keys = (draw(2 * width, HIDDEN).to(device) for width in (columns, index_columns))
    w_heads = draw(INDEX_HEADS, HIDDEN).to(device)
    w_index_q = draw(INDEX_HEADS * INDEX_WIDTH, Q_RANK).to(device)

    def down_proj(x: Tensor) -> tuple[Tensor, ...]:
        parts = [F.linear(x, w_row)]
        if kind.ratio:
            parts.append(F.linear(x, w_entries))
        if kind.has_indexer:  # The kernels expect the rotated columns first.
            parts += [rotated_first(F.linear(x, w_keys), INDEX_WIDTH, ROPE), F.linear(x, w_heads)]
        return tuple(parts)

    def o_a_proj(x: Tensor) -> Tensor:
        return torch.einsum("tgi,goi->tgo", x.unflatten(1, (len(o_a), -1)), o_a).flatten(1)

    def o_b_proj(x: Tensor) -> Tensor:
        dist.all_reduce(out := F.linear(x, o_b), group=group)
        return out

    return CompressedModules(
        down_proj=down_proj,
        q_proj=lambda q_c: F.linear(q_c, q_b),
        q_norm=torch.ones(Q_RANK, device=device),
        kv_norm=torch.ones(WIDTH, device=device),
        sinks=sinks.chunk(size)[rank],
        compressor=my_compressor(kind.ratio, columns, WIDTH, device) if kind.ratio else None,
        index_compressor=my_compressor(kind.ratio, index_columns, INDEX_WIDTH, device) if kind.has_indexer else None,
        index_q_proj=(lambda q_c: rotated_first(F.linear(q_c, w_index_q), INDEX_WIDTH, ROPE))
        if kind.has_indexer
        else None,
        o_a_proj=o_a_proj,
        o_b_proj=o_b_proj,
    )


@torch.inference_mode()
def main() -> None:
    ranks = read_launcher("auto")
    with distributed(ranks, timedelta(minutes=10)):
        group, size, device = dist.new_group(), ranks.num_ranks, ranks.device
        mesh = DCPMesh(tp_group=group, dcp_group=group)
        dcp = DCPConfig(tensor_parallel_size=size, decode_context_parallel_size=size, block_size=BLOCK_SIZE)
        exchange = select_exchange(dcp, group, device).exchange
        faults = StepFaults(exchange, dcp, group, device)
        placement = Placement(dcp, mesh, exchange, torch.float32, device)
        torch.manual_seed(0)
        layers = [
            ExternalCompressedAttention(CONFIG, kind, placement, my_modules(kind, group, device))
            for kind in CONFIG.layer_kinds
        ]
        plan = plan_compressed(CONFIG, dcp, [SEQ_LEN], torch.float32)
        cache = CompressedCache(plan, device)
        block_table = list(reversed(range(plan.num_blocks)))  # the same ids on all ranks
        hidden_states = torch.randn(SEQ_LEN, HIDDEN).to(device)
        tables = [
            torch.cat([angles.cos(), angles.sin()], -1).to(device)
            for angles in (torch.arange(MAX_TOKENS)[:, None] / base ** (torch.arange(8) / 8) for base in (1e4, 1.6e5))
        ]
        steps = StepBuilder(plan.dcp, mesh.dcp_rank, device, compressed_traits(plan))
        for start, end in [(0, PROMPT_LEN), *((pos, pos + 1) for pos in range(PROMPT_LEN, SEQ_LEN))]:
            step = steps.build(StepRequests([end - start], [end], [block_table], states=[0]))
            step = with_angles(step, lambda positions, is_compressed: tables[is_compressed][positions])
            x = hidden_states[start:end]
            for layer, layer_cache in zip(layers, cache, strict=True):
                x = x + layer(x, layer_cache, step)
            check = faults.start()
            result = x[-1, :4].tolist()
            check()  # no result of a failed exchange is used
            if ranks.is_first:
                print(f"tokens {start} to {end}: {[round(value, 3) for value in result]}")


if __name__ == "__main__":
    main()
