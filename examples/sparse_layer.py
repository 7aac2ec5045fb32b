"""Sparse MLA in an engine of one's own: a layer with an indexer, and one that shares its selection; random weights.

    torchrun --standalone --nproc-per-node 4 examples/sparse_layer.py

or, as one process, `python examples/sparse_layer.py`. The indexer's projections are the engine's, with queries in
8 bits, and so are the table of angles and the memory of selected positions. Any number of ranks that divides the heads
prints the same.
"""

from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

from dcpmla import (
    DCPConfig,
    DCPMesh,
    ExternalAttention,
    IndexerConfig,
    MLAConfig,
    MLAModules,
    Placement,
    select_exchange,
)
from dcpmla.attention.select.step import with_selection
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.layers import LayerCache
from dcpmla.comm.faults import StepFaults
from dcpmla.integrations.external.indexer import IndexerModules
from dcpmla.job.bootstrap import distributed, read_launcher

INDEX_HEADS, INDEX_DIM, TOPK = 4, 32, 16
CONFIG = MLAConfig(
    hidden_size=256,
    num_heads=8,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    softmax_scale=48**-0.5,
    indexer=IndexerConfig(num_heads=INDEX_HEADS, head_dim=INDEX_DIM, topk=TOPK, rope_interleaved=False),
)
PROMPT_LEN, SEQ_LEN, BLOCK_SIZE, MAX_TOKENS = 40, 48, 4, 64


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape) / 10


def my_indexer(device: torch.device) -> IndexerModules:
    """Draw an indexer's weights, the same on all ranks. Queries are projected by codes in 8 bits."""
    w = draw(INDEX_HEADS * INDEX_DIM, 96).to(device)
    scale = w.abs().amax(1, keepdim=True) / 127
    codes = (w / scale).round().to(torch.int8)
    w_keys, w_heads = draw(INDEX_DIM, 256).to(device), draw(INDEX_HEADS, 256).to(device)
    return IndexerModules(
        q_proj=lambda q_c: F.linear(q_c, codes.to(q_c.dtype) * scale),
        down_proj=lambda x: (F.linear(x, w_keys), F.linear(x, w_heads)),
        k_norm=(torch.ones(INDEX_DIM, device=device), torch.zeros(INDEX_DIM, device=device)),
    )


def my_modules(group: dist.ProcessGroup, device: torch.device, indexer: IndexerModules | None) -> MLAModules:
    """Draw all heads' weights, the same on all ranks, and return the projections of this rank's heads."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    down, q_b, kv_b, o = (draw(*shape).to(device) for shape in ((176, 256), (384, 96), (512, 64), (256, 256)))
    q_b, kv_b, o = q_b.chunk(size)[rank], kv_b.chunk(size)[rank], o.chunk(size, dim=1)[rank]

    def o_proj(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(out := F.linear(x, o), group=group)
        return out

    return MLAModules(
        down_proj=partial(F.linear, weight=down),
        q_proj=partial(F.linear, weight=q_b),
        q_a_layernorm=torch.ones(96, device=device),
        kv_a_layernorm=torch.ones(64, device=device),
        w_kv_b=kv_b,
        o_proj=o_proj,
        indexer=indexer,
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
            ExternalAttention(CONFIG, placement, my_modules(group, device, my_indexer(device))),
            ExternalAttention(CONFIG, placement, my_modules(group, device, None), skip_topk=True),
        ]
        block_table = list(reversed(range(-(-SEQ_LEN // (BLOCK_SIZE * size)))))  # the same ids on all ranks
        latents = torch.empty(2, len(block_table), BLOCK_SIZE, CONFIG.latent_dim, device=device)
        keys = torch.empty(len(block_table), BLOCK_SIZE, INDEX_DIM, device=device)  # only the first layer has them
        caches = [LayerCache(latents[0], keys), LayerCache(latents[1])]
        hidden_states = torch.randn(SEQ_LEN, CONFIG.hidden_size).to(device)
        angles = torch.arange(MAX_TOKENS)[:, None] / 10_000 ** (torch.arange(8) / 8)
        table = torch.cat([angles.cos(), angles.sin()], -1).to(device)
        selected = torch.empty(MAX_TOKENS, TOPK, dtype=torch.int32, device=device)  # positions, layer after layer
        steps = StepBuilder(dcp, mesh.dcp_rank, device)
        for start, end in [(0, PROMPT_LEN), *((pos, pos + 1) for pos in range(PROMPT_LEN, SEQ_LEN))]:
            step = steps.build(StepRequests([end - start], [end], [block_table]))
            step = with_selection(step.with_cos_sin(table[step.tokens.positions]), TOPK, selected)
            x = hidden_states[start:end]
            for layer, cache in zip(layers, caches, strict=True):
                x = x + layer(x, cache, step)
            check = faults.start()
            result, chosen = x[-1, :4].tolist(), sorted(selected[end - start - 1].tolist())
            check()  # no result of a failed exchange is used
            if ranks.is_first:
                print(f"tokens {start} to {end}: {[round(value, 3) for value in result]}, selected {chosen}")


if __name__ == "__main__":
    main()
