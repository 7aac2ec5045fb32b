"""A stack of MLA layers (`dcpmla.bench.stack`)."""

from typing import Any

from dcpmla.attention.mla.decode import decode_call, mla_decode
from dcpmla.attention.mla.latent_spec import LatentSpec
from dcpmla.attention.mla.layer import PROJECT_FIRST_TOKENS
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.attention.projections import project_values
from dcpmla.attention.stack import Stack as AttentionStack
from dcpmla.bench.cache_formats import KV_SCALE, fill_randomly
from dcpmla.bench.stack import Stack, StackSizes
from dcpmla.cache.formats import row_width, to_fp8
from dcpmla.config import MLAConfig
from dcpmla.parallel.quantized import unpack


class LayerStack(Stack):
    """MLA layers, dense.

    Args:
        sizes: Number of layers and their load.
        options: Fields of DCPConfig, for the format of the cache and the exchange of decode.
    Attributes:
        projects_first: Whether a step projects before it merges, which needs PROJECT_FIRST_TOKENS.
    """

    def __init__(self, config: MLAConfig, sizes: StackSizes, **options: Any) -> None:
        kv_scale = KV_SCALE if options.get("kv_cache_dtype") == "fp8" else None
        dcp = sizes.dcp_config(**{"kv_cache_scale": kv_scale, **options})
        self.projects_first = dcp.dcp_project_before_merge and sizes.batch >= PROJECT_FIRST_TOKENS
        attention = AttentionStack(config, (LatentSpec(config),) * sizes.num_layers)
        super().__init__(attention, sizes, dcp, config.v_head_dim if self.projects_first else None)
        if (q_scale := self.layers[0].q_scale) is not None:
            self.q, self.group_q = to_fp8(self.q, q_scale), to_fp8(self.group_q, q_scale)
        self.group_out = self.randn(*self.group_rows.shape[:2], config.kv_lora_rank)

    def row_bytes(self, plan: Any) -> int:
        return row_width(plan.dtype, self.config.kv_lora_rank, self.rope_dim) * plan.dtype.itemsize

    def fill(self, cache: Any) -> None:
        fill_randomly(cache.latents, self.config.kv_lora_rank, self.dtype)

    @property
    def rope_dim(self) -> int:
        return self.config.qk_rope_head_dim

    def attend(self, index: int) -> None:
        hidden, metadata = self.inputs(index)
        decode = metadata.decode
        assert decode is not None
        for layer, cache in zip(self.layers, self.cache, strict=True):
            options = {"kv_scale": layer.kv_scale, "q_scale": layer.q_scale, "dtype": hidden.dtype}
            sizes = self.config.softmax_scale, self.config.kv_lora_rank
            mla_decode(decode_call(self.group_q, cache.latents, decode, *sizes, **options))

    def finish(self, index: int) -> None:
        """Run W_UV, before or after the merge, o_proj and its all-reduce."""
        for layer in self.layers:
            if self.projects_first:
                project_values(ValueProjection(self.group_out, *unpack(layer.w_uv(slice(None)))))
                layer.o_proj(self.rows.flatten(1))
            else:
                layer.o_proj(project_values(ValueProjection(self.rows, *unpack(layer.w_uv(layer.kv_heads.own)))))
