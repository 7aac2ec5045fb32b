"""The attention layer alone, with random weights: a prompt, then decode steps, over a cache sharded by all ranks.

    torchrun --standalone --nproc-per-node 4 examples/layer.py

or, as one process, `python examples/layer.py`. Any number of ranks that divides the heads prints the same numbers.
"""

from datetime import timedelta

import torch

from dcpmla import DCPConfig, LatentCache, MLAAttention, MLAConfig, StepMetadata, init_mesh, select_exchange
from dcpmla.job.bootstrap import distributed, read_launcher

CONFIG = MLAConfig(
    hidden_size=256,
    num_heads=8,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    scale=48**-0.5,
)
SHAPES = {"q_a_proj": (96, 256), "q_a_layernorm": (96,), "q_b_proj": (8 * 48, 96), "kv_a_proj_with_mqa": (80, 256)}
SHAPES |= {"kv_a_layernorm": (64,), "kv_b_proj": (8 * 64, 64), "o_proj": (256, 8 * 32)}
PROMPT_LEN, SEQ_LEN = 40, 48


@torch.inference_mode()
def main() -> None:
    ranks = read_launcher("auto")
    with distributed(ranks, timedelta(minutes=10)):
        mesh = init_mesh(ranks.num_ranks, ranks.num_ranks)
        dcp = DCPConfig(tensor_parallel_size=mesh.tp_size, decode_context_parallel_size=mesh.dcp_size)
        chosen = select_exchange(dcp, mesh.dcp_group, ranks.device)
        layer = MLAAttention(CONFIG, dcp, mesh, chosen.exchange, torch.float32, ranks.device)
        torch.manual_seed(0)  # all ranks draw the same weights, and take their slices
        layer.load_weights({f"{name}.weight": torch.randn(shape) / 10 for name, shape in SHAPES.items()})
        plan = LatentCache.plan(CONFIG, dcp, num_layers=1, seq_lens=[SEQ_LEN], dtype=torch.float32)
        cache, blocks = LatentCache(plan, ranks.device), list(range(plan.num_blocks))
        hidden_states = torch.randn(SEQ_LEN, CONFIG.hidden_size).to(ranks.device)
        angles = torch.arange(SEQ_LEN)[:, None] / 10_000 ** (torch.arange(8) / 8)
        cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(ranks.device)
        for start, end in [(0, PROMPT_LEN), *((pos, pos + 1) for pos in range(PROMPT_LEN, SEQ_LEN))]:
            step = StepMetadata.build([end - start], [end], [blocks], dcp, mesh.dcp_rank, ranks.device)
            out = layer(hidden_states[start:end], cache[0], step.with_positions(cos_sin[start:end]))
            if ranks.is_first:
                print(f"tokens {start} to {end}: {[round(value, 3) for value in out[-1, :4].tolist()]}")


if __name__ == "__main__":
    main()
