"""HY V4: sparse MLA with gates and sinks, over independent streams of the residual; and the text model of HY V4 VL."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dcpmla.config import MLAConfig
from dcpmla.fields import list_of, number, one_of, only, whole
from dcpmla.integrations.families.sparse import LAYER_RULES, SparseFamily
from dcpmla.integrations.families.streams import drop_connections, load_streams
from dcpmla.model.glu import SWIGLU, LayerGlus
from dcpmla.model.mixing import Constants

_NAMES = (
    (r"\.hc_pre\.hc_", ".hc_"),
    (r"\.hc_attn_layer\.hc_", ".attn_hc."),
    (r"\.hc_mlp_layer\.hc_", ".ffn_hc."),
    (r"\.hc_head_", ".hc_"),
    (r"\.final_layernorm\.", ".shared_head.norm."),
    (r"\.learnable_sink_param$", ".sinks"),
    (r"\.linear_gate\.", ".gate_proj."),  # transformers saves MLPs under this name, too
    (r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),
    (r"model\.mtp_layers\.0\.", "model.layers.{mtp}."),
)
_RULES = {  # vLLM's config has these fields; other values are other models
    **dict.fromkeys(("enable_ihc", "gated_mla", "learnable_sink"), only(True)),
    "gating_type": one_of(("elementwise",)),
    "hc_magnitude": number(0, 1e3),
    **LAYER_RULES,
}
_VL_RULES = _RULES | {"rope_parameters.mrope_section": list_of(whole(0), 3)}


@dataclass(frozen=True)
class _HyV4(SparseFamily):
    """HY V4, whose rotary embeddings rotate halves (rope_interleaved), in the indexer of the last columns."""

    def mla(self, config: Any) -> MLAConfig:
        """Return the geometry of layers with sinks, and a gate for each column of a head."""
        mla = super().mla(config)
        assert mla.indexer is not None
        indexer = replace(mla.indexer, rope_last=True, norm_eps=config.rms_norm_eps)
        mla = replace(mla, has_sinks=True, num_gates=mla.v_head_dim)
        return replace(mla, rope_interleaved=self.rope_interleaved, indexer=indexer)

    def glus(self, config: Any, layer: int) -> LayerGlus:
        """Return a layer's gated linear units: swiglu_limit bounds routed experts alone."""
        return LayerGlus(super().glus(config, layer).routed, SWIGLU, SWIGLU)

    def extend(self, model: Any) -> None:
        """Give the gates' projections the name that other families have for them; an MTP module has no streams."""
        drop_connections(model)
        for layer in model.model.layers:
            layer.self_attn.g_proj = layer.self_attn.gate_proj
            del layer.self_attn.gate_proj


@dataclass(frozen=True)
class _HyV4Vl(_HyV4):
    """The text model of HY V4 VL, whose rotary embeddings rotate pairs, and whose latents' norms have the config's eps.

    The sections of its rotary embedding matter for images alone: in text a token's three positions are equal.
    """

    def read_config(self, raw: dict[str, Any]) -> Any:
        """Return HY V4's config of the fields, with this family's model type."""
        self.check_raw(raw)
        fields = self.config_class().from_dict(raw).to_dict()
        del fields["rope_parameters"]["mrope_section"]
        model_type = fields.pop("model_type")
        config = HY_V4.read_config(fields)
        config.model_type = model_type
        return config

    def mla(self, config: Any) -> MLAConfig:
        """Return the geometry, whose norms of latents have the other norms' epsilon."""
        return replace(super().mla(config), rms_norm_eps=config.rms_norm_eps)


def _constants(config: Any) -> Constants:
    """Return the constants of streams that are not mixed with each other."""
    return Constants(config.rms_norm_eps, config.hc_eps, 0, config.hc_magnitude, post_eps=config.hc_eps)


_load_decoder = partial(load_streams, constants_of=_constants, collapses=True)
HY_V4 = _HyV4("HYV4", load_decoder=_load_decoder, rules=_RULES, names=_NAMES)
HY_V4_VL = _HyV4Vl(
    "HYV4VLText",
    load_decoder=_load_decoder,
    rules=_VL_RULES,
    names=_NAMES,
    rope_interleaved=True,
)
