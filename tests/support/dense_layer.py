"""A dense MLA layer with random weights in a process of one rank, from the core's parts alone."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla import DCPConfig, MLAConfig, Placement, StepRequests, init_mesh, select_exchange
from dcpmla.attention.mla.latent_spec import LatentSpec
from dcpmla.attention.stack import Stack

CONFIG = MLAConfig(
    hidden_size=64,
    num_heads=4,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    softmax_scale=24**-0.5,
)
CPU = torch.device("cpu")
SEQ_LEN = 12


class DenseLayer:
    """The layer, its cache of one sequence and the hidden states of that sequence."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        dcp, mesh = DCPConfig(block_size=4), init_mesh(1, 1)
        kind = Stack(CONFIG, (LatentSpec(CONFIG),))
        kind.check_layout(dcp)
        plan = kind.plan_cache(dcp, [SEQ_LEN], torch.float32)
        self.cache = plan.allocate(CPU)[0]
        self.builder = kind.step_builder(plan, dcp, mesh.dcp_rank, CPU)
        exchange = select_exchange(dcp, mesh.dcp_group, CPU).exchange
        self.layer = kind.layers[0].new_layer(Placement(dcp, mesh, exchange, torch.float32, CPU))
        self.layer.load_weights({name: torch.randn(shape) / 8 for name, shape in shapes(CONFIG).items()})
        self.hidden_states = torch.randn(SEQ_LEN, CONFIG.hidden_size)
        self.cos_sin = torch.randn(SEQ_LEN, CONFIG.qk_rope_head_dim)

    def step(self, start: int, end: int) -> Tensor:
        """Compute the tokens from start to end, after those before start."""
        step = self.builder.build(StepRequests([end - start], [end], [[2, 0, 1]])).with_cos_sin(self.cos_sin[start:end])
        return self.layer(self.hidden_states[start:end], self.cache, step)


def shapes(config: MLAConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's weights, by their names in a checkpoint."""
    assert config.q_lora_rank is not None
    return {
        "q_a_proj.weight": (config.q_lora_rank, config.hidden_size),
        "q_a_layernorm.weight": (config.q_lora_rank,),
        "q_b_proj.weight": (config.num_heads * config.qk_head_dim, config.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (config.latent_dim, config.hidden_size),
        "kv_a_layernorm.weight": (config.kv_lora_rank,),
        "kv_b_proj.weight": (config.num_heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        "o_proj.weight": (config.hidden_size, config.num_heads * config.v_head_dim),
    }


@contextmanager
def one_rank() -> Iterator[None]:
    """Run a block with torch.distributed initialized for this process alone, without gradients."""
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        store = dist.FileStore(os.path.join(directory, "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def check_steps() -> None:
    """Check that a prompt and the decodes after it agree with the whole sequence as one prompt."""
    with one_rank():
        layer = DenseLayer()
        expected = layer.step(0, SEQ_LEN)
        parts = [layer.step(0, 9), *(layer.step(position, position + 1) for position in range(9, SEQ_LEN))]
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-5)
        assert expected.abs().max() > 0.1
