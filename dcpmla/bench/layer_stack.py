"""A stack of MLA layers (`dcpmla.bench.stack`)."""

from functools import partial
from typing import Any

import torch

from dcpmla.attention.backends.calls import decode_workspace
from dcpmla.attention.mla.decode import decode_call, mla_decode
from dcpmla.attention.mla.latent_spec import LatentSpec, query_factor
from dcpmla.attention.mla.layer import PROJECT_FIRST_TOKENS, MLAAttention
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.attention.projections import project_values
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.bench.cache_formats import KV_SCALE, fill_randomly
from dcpmla.bench.stack import MOST_STEPS, Stack, StackSizes
from dcpmla.bench.stack import PARTS as ALL_PARTS
from dcpmla.bench.timing import num_rotated
from dcpmla.cache.formats import to_fp8
from dcpmla.cache.latent import LatentCache, num_blocks
from dcpmla.config import MLAConfig
from dcpmla.parallel.quantized import unpack

PARTS = tuple(part for part in ALL_PARTS if part != "selection")


class LayerStack(Stack):
    """MLA layers, dense.

    Args:
        sizes: Number of layers and their load.
        options: Fields of DCPConfig, for the format of the cache and the exchange of decode.
    Attributes:
        projects_first: Whether a step projects before it merges, which needs PROJECT_FIRST_TOKENS.
    Raises:
        ValueError: Heads do not divide, or the cache does not fit.
    """

    def __init__(self, config: MLAConfig, sizes: StackSizes, **options: Any) -> None:
        mesh, num_layers, batch, context = sizes.mesh, sizes.num_layers, sizes.batch, sizes.context
        kv_scale = KV_SCALE if options.get("kv_cache_dtype") == "fp8" else None
        dcp = sizes.dcp_config(**{"kv_cache_scale": kv_scale, **options})
        super().__init__(sizes, dcp, LatentSpec(config).reads(context))
        self.config = config
        self.projects_first = dcp.dcp_project_before_merge and batch >= PROJECT_FIRST_TOKENS
        self.layers = [MLAAttention(config, self.placement) for _ in range(num_layers)]
        self.draw_weights()
        plan, device = partial(LatentCache.plan, config, dcp, num_layers, dtype=self.dtype), self.device
        num_steps = num_rotated(plan([context] * batch).bytes_per_rank, device, MOST_STEPS)
        self.cache: LatentCache = LatentCache(plan([context] * batch * num_steps), device)
        for cache in self.cache:
            fill_randomly(cache.latents, config.kv_lora_rank, self.dtype)
        ids = torch.randperm(self.cache.sizes.num_blocks).view(num_steps, batch, num_blocks(context, dcp))
        workspace, steps = decode_workspace(device), StepBuilder(dcp, mesh.dcp_rank, device)
        self.metadata = [
            steps.build(StepRequests([1] * batch, [context] * batch, table), workspace=workspace)
            for table in ids.tolist()
        ]
        heads, group_heads = config.num_heads // mesh.tp_size, config.num_heads // mesh.tp_size * mesh.dcp_size
        self.hidden = self.randn(num_steps, batch, config.hidden_size)
        q, group_q = (self.randn(batch, num_heads, config.latent_dim) for num_heads in (heads, group_heads))
        q_scale = self.layers[0].q_scale
        self.q, self.group_q = (q, group_q) if q_scale is None else (to_fp8(q, q_scale), to_fp8(group_q, q_scale))
        self.group_out = self.randn(batch, group_heads, config.kv_lora_rank)
        row_dim = config.v_head_dim if self.projects_first else config.kv_lora_rank
        self.group_rows = self.randn(batch, group_heads, row_dim)
        self.group_lse = torch.randn(batch, group_heads, device=device)
        self.rows = self.randn(batch, heads, row_dim)
        cos_sin = torch.randn(batch, config.qk_rope_head_dim, device=device)
        factor = query_factor(
            self.metadata[0].tokens.positions, config.llama_4_scaling, self.dtype
        )  # the same in all steps
        self.metadata = [step.with_cos_sin(cos_sin, factor) for step in self.metadata]

    def attend(self, index: int = 0) -> None:
        """Attend with the group's heads to this rank's tokens."""
        hidden, metadata = self._inputs(index)
        decode = metadata.decode
        assert decode is not None
        for layer, cache in zip(self.layers, self.cache, strict=True):
            options = {"kv_scale": layer.kv_scale, "q_scale": layer.q_scale, "dtype": hidden.dtype}
            sizes = self.config.softmax_scale, self.config.kv_lora_rank
            mla_decode(decode_call(self.group_q, cache.latents, decode, *sizes, **options))

    def finish(self, _: int = 0) -> None:
        """Run W_UV, before or after the merge, o_proj and its all-reduce."""
        for layer in self.layers:
            if self.projects_first:
                project_values(ValueProjection(self.group_out, *unpack(layer.w_uv(slice(None)))))
                layer.o_proj(self.rows.flatten(1))
            else:
                layer.o_proj(project_values(ValueProjection(self.rows, *unpack(layer.w_uv(layer.kv_heads.own)))))
