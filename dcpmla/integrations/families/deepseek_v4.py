"""DeepSeek-V4: attention over a window and compressed entries, blocks over several streams, names of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcpmla.attention.layers.compressed.spec import compressed_stack
from dcpmla.attention.stack import Stack
from dcpmla.fields import EVEN_SIZE, only
from dcpmla.integrations.families.deepseek_v4_config import check_compressed, compressed_config
from dcpmla.integrations.families.deepseek_v4_dspark import DSPARK_NAMES, DSPARK_RULES, WINDOWS, DSparkFamily
from dcpmla.integrations.families.family import NO_MTP
from dcpmla.integrations.families.routing import Routing
from dcpmla.integrations.families.streams import load_stream_mtp, load_streams

_RULES = {
    **dict.fromkeys(("num_key_value_heads", "n_shared_experts"), only(1)),
    "attention_bias": only(False),
    "index_head_dim": EVEN_SIZE,
    **DSPARK_RULES,
}
V4_NAMES = (  # published names of tensors
    *DSPARK_NAMES,
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^norm\.", "model.norm."),
    (r"^hc_head_(fn|base|scale)$", r"model.hc_head.hc_\1"),
    (r"^layers\.", "model.layers."),
    (r"(?<!_hc)\.scale$", ".weight_scale_inv"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"(experts\.(?:\d+\.)?)w1\.", r"\1gate_proj."),
    (r"(experts\.(?:\d+\.)?)w2\.", r"\1down_proj."),
    (r"(experts\.(?:\d+\.)?)w3\.", r"\1up_proj."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.self_attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"(\.self_attn\.(?:compressor\.)?(?:indexer\.)?)norm\.", r"\1kv_norm."),
    (r"\.self_attn\.q_norm\.", ".self_attn.q_a_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.w([qo])_([ab])\.", r".\1_\2_proj."),
)


@dataclass(frozen=True)
class _DeepseekV4(DSparkFamily):
    """DeepSeek-V4, whose MTP or DSpark module has a window alone and a router of its own."""

    def complete(self, config: Any, raw: Mapping[str, Any]) -> None:
        """Add the module's entries as mtp_attention and module_ratios."""
        name = "compress_ratios" if raw.get("layer_types") is None else "layer_types"
        config.module_ratios = (raw.get(name) or [])[config.num_hidden_layers :]
        config.mtp_attention = {name: config.module_ratios[:1]}

    def translate(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the fields, whose two fields for the width of the rotary embedding agree."""
        width, rotated = raw.get("head_dim", self.config_class().head_dim), raw.get("qk_rope_head_dim")
        factor = raw.get("partial_rotary_factor")
        if rotated is not None and rotated > width:
            raise ValueError(f"qk_rope_head_dim is {rotated}; it must be at most head_dim {width}")
        if rotated is not None and factor is not None and int(width * factor) != rotated:
            raise ValueError(
                f"qk_rope_head_dim is {rotated}; it must be head_dim {width} times partial_rotary_factor {factor}"
            )
        return raw

    def attention(self, config: Any, has_mtp: bool = False) -> Stack:
        """Return the attention of all layers."""
        return compressed_stack(self.with_block(compressed_config(config), config))

    def check_mtp(self, config: Any) -> None:
        """Raise ValueError for a model without an MTP module, or with one that compresses."""
        super().check_mtp(config)
        for name, entries in getattr(config, "mtp_attention", {}).items():
            if entries and entries[0] not in WINDOWS:
                raise ValueError(
                    f"speculative_method (--speculative-method) is 'mtp', but the config's {name} has {entries[0]!r} "
                    f"for the MTP layer; it must be one of {WINDOWS}, a window alone: {NO_MTP}"
                )


DEEPSEEK_V4 = _DeepseekV4(
    "DeepseekV4",
    Routing(scoring=None, group_score="max"),
    check_compressed,
    load_streams,
    load_stream_mtp,
    rules=_RULES,
    mtp_layer={"layer_types": "sliding_attention", "mlp_layer_types": "moe"},
    mtp_projections=("e_proj", "h_proj"),
    names=V4_NAMES,
)
