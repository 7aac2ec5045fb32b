"""The attention layer in an engine of one's own: a prompt, then decode steps, with random weights.

    torchrun --standalone --nproc-per-node 4 examples/layer.py

or, as one process, `python examples/layer.py`. Groups, projections, cache memory and block tables are the engine's; the
layer brings attention, the exchange and a step's layout. Any number of ranks that divides the heads prints the same.
"""

from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

from dcpmla import DCPConfig, DCPMesh, ExternalAttention, MLAConfig, MLAModules, Placement, select_exchange
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.layers import LayerCache
from dcpmla.comm.faults import StepFaults
from dcpmla.job.bootstrap import distributed, read_launcher

CONFIG = MLAConfig(
    hidden_size=256,
    num_heads=8,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    softmax_scale=48**-0.5,
)
SHAPES = {"q_a": (96, 256), "q_a_norm": (96,), "q_b": (8 * 48, 96), "kv_a": (80, 256), "kv_a_norm": (64,)}
SHAPES |= {"kv_b": (8 * 64, 64), "o": (256, 8 * 32)}
PROMPT_LEN, SEQ_LEN, BLOCK_SIZE = 40, 48, 4


def my_modules(group: dist.ProcessGroup, device: torch.device) -> MLAModules:
    """Draw all heads' weights, the same on all ranks, and return the projections of this rank's heads."""
    torch.manual_seed(0)
    w = {name: (torch.randn(shape) / 10).to(device) for name, shape in SHAPES.items()}
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    q_b, kv_b, o = w["q_b"].chunk(size)[rank], w["kv_b"].chunk(size)[rank], w["o"].chunk(size, dim=1)[rank]

    def o_proj(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(out := F.linear(x, o), group=group)
        return out

    return MLAModules(
        down_proj=partial(F.linear, weight=torch.cat([w["q_a"], w["kv_a"]])),
        q_proj=partial(F.linear, weight=q_b),
        q_a_layernorm=w["q_a_norm"],
        kv_a_layernorm=w["kv_a_norm"],
        w_kv_b=kv_b,
        o_proj=o_proj,
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
        modules = my_modules(group, device)
        layer = ExternalAttention(CONFIG, placement, modules)
        block_table = list(reversed(range(-(-SEQ_LEN // (BLOCK_SIZE * size)))))  # the same ids on all ranks
        cache = LayerCache(torch.empty(len(block_table), BLOCK_SIZE, CONFIG.latent_dim, device=device))
        hidden_states = torch.randn(SEQ_LEN, CONFIG.hidden_size).to(device)
        angles = torch.arange(SEQ_LEN)[:, None] / 10_000 ** (torch.arange(8) / 8)
        cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(device)
        for start, end in [(0, PROMPT_LEN), *((pos, pos + 1) for pos in range(PROMPT_LEN, SEQ_LEN))]:
            step = StepBuilder(dcp, mesh.dcp_rank, device).build(StepRequests([end - start], [end], [block_table]))
            out = layer(hidden_states[start:end], cache, step.with_cos_sin(cos_sin[start:end]))
            check = faults.start()
            result = out[-1, :4].tolist()
            check()  # no result of a failed exchange is used
            if ranks.is_first:
                print(f"tokens {start} to {end}: {[round(value, 3) for value in result]}")


if __name__ == "__main__":
    main()
