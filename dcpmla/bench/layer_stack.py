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
from dcpmla.bench.timing import num_rotated
from dcpmla.cache.formats import to_fp8
from dcpmla.cache.latent import LatentCache, num_blocks
from dcpmla.config import MLAConfig
from dcpmla.parallel.quantized import unpack


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
        super().__init__(sizes, dcp, LatentSpec(config).reads(context), partial(MLAAttention, config))
        self.config = config
        self.projects_first = dcp.dcp_project_before_merge and batch >= PROJECT_FIRST_TOKENS
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
        row_dim = config.v_head_dim if self.projects_first else config.kv_lora_rank
        heads = config.num_heads // mesh.tp_size
        self.draw_inputs(sizes, config.hidden_size, heads, config.latent_dim, row_dim)
        if (q_scale := self.layers[0].q_scale) is not None:
            self.q, self.group_q = to_fp8(self.q, q_scale), to_fp8(self.group_q, q_scale)
        self.group_out = self.randn(batch, heads * mesh.dcp_size, config.kv_lora_rank)
        cos_sin = torch.randn(batch, config.qk_rope_head_dim, device=device)
        positions = self.metadata[0].tokens.positions  # the same in all steps
        factor = query_factor(positions, config.llama_4_scaling, self.dtype)
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
