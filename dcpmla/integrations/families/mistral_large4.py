"""The text model of Mistral Large 4: sparse MLA with and without positions, whose queries have factors."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from dcpmla.attention.mla.factored_spec import FactoredSpec, without_positions
from dcpmla.attention.spec import LayerSpec
from dcpmla.config import MLAConfig
from dcpmla.fields import Rule, list_of, number, only, optional, whole
from dcpmla.integrations.config_checks import check_lengths, check_mla
from dcpmla.integrations.families.routing import Routing
from dcpmla.integrations.families.sparse import LAYER_RULES, SparseFamily
from dcpmla.integrations.parts import Parts, load_decoder
from dcpmla.model.block import Decoder
from dcpmla.parallel.linear import fill

_RULES = {
    "q_lora_rank": Rule("null, as queries are made from hidden states", lambda value: value is None),
    **dict.fromkeys(("norm_topk_prob", "rope_interleave", "indexer_rope_interleave"), only(True)),
    "final_logit_softcapping": number(0, above=True),
    **dict.fromkeys(("no_rope_layer_interval", "index_topk_freq"), whole(1)),
    "index_skip_topk_offset": whole(1),
    "no_rope_layers": optional(list_of(whole(0, 1))),
    "kv_source_layers": optional(list_of(whole(0, 1023))),
    **LAYER_RULES,
}
_NAMES = (  # Mistral's own
    (r"^tok_embeddings\.", "model.embed_tokens."),
    (r"^lerope\.", "model.rotary_emb."),
    (r"^(layers|norm)\.", r"model.\1."),
    (r"^output\.", "lm_head."),
    (r"(\.layers\.\d+)\.attention\.", r"\1.self_attn."),
    (r"\.self_attn\.w([qo])\.", r".self_attn.\1_proj."),
    (r"\.self_attn\.wkv_a_with_mqa\.", ".self_attn.kv_a_proj_with_mqa."),
    (r"\.self_attn\.wkv_b\.", ".self_attn.kv_b_proj."),
    (r"\.self_attn\.kv_a_norm\.", ".self_attn.kv_a_layernorm."),
    (r"\.ssmax_scaling\.s$", ".softmax_scaling.scale"),
    (r"\.ssmax_scaling\.b$", ".softmax_scaling.bias"),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.feed_forward\.", ".mlp."),
    (r"(\.layers\.\d+)\.(gate|experts|shared_experts)\.", r"\1.mlp.\2."),
    (r"(\.mlp\b.*)\.w1\.", r"\1.gate_proj."),
    (r"(\.mlp\b.*)\.w2\.", r"\1.down_proj."),
    (r"(\.mlp\b.*)\.w3\.", r"\1.up_proj."),
)


@dataclass(frozen=True)
class _MistralLarge4(SparseFamily):
    """Mistral Large 4, whose layers have latents of their own or attend to an earlier layer's."""

    def translate(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the fields, whose lists have an entry a layer."""
        _check_lists(raw, raw.get("num_hidden_layers", self.config_class().num_hidden_layers))
        return raw

    def mla(self, config: Any) -> MLAConfig:
        """Return the geometry of layers with positions."""
        mla = super().mla(config)
        assert mla.indexer is not None
        indexer = replace(mla.indexer, norms_hidden=True)
        return replace(mla, indexer=indexer, rms_norm_eps=config.rms_norm_eps, has_query_factors=True)

    def layers(self, config: Any, mla: MLAConfig, has_mtp: bool) -> Iterable[LayerSpec]:
        """Return sparse MLA, with and without positions."""
        geometries, plain = (without_positions(mla), mla), super().layers(config, mla, has_mtp)
        return (
            FactoredSpec(
                geometries[bool(config.no_rope_layers[layer])],
                spec.has_indexer,
                source=None if source == layer else source,
                is_source=layer in config.kv_source_layers[layer + 1 :],
            )
            for layer, (spec, source) in enumerate(zip(plain, config.kv_source_layers, strict=True))
        )


def _check_lists(raw: dict[str, Any], num_layers: int) -> None:
    """Raise ValueError for lists of a wrong length, and for a source without latents of its own."""
    check_lengths(raw, ("no_rope_layers", "mlp_layer_types", "indexer_types", "index_topk_pattern"), num_layers)
    if (sources := raw.get("kv_source_layers")) is None:
        return
    if len(sources) != num_layers:
        raise ValueError(f"kv_source_layers has {len(sources)} entries; num_hidden_layers is {num_layers}")
    for layer, source in enumerate(sources):
        if source > layer or sources[source] != source:
            raise ValueError(
                f"kv_source_layers has {source} for layer {layer}; it must be {layer}, or an earlier layer that is its "
                f"own source"
            )


def _check(config: Any) -> None:
    """Raise ValueError for inconsistent fields of MLA, and for a source that transformers does not read.

    transformers passes a layer the latents of the latest source with positions, or of the latest without.
    """
    check_mla(config)
    latest: dict[int, int] = {}
    sources = config.kv_source_layers
    for layer, (source, has_positions) in enumerate(zip(sources, config.no_rope_layers, strict=False)):
        if source != layer and latest.get(has_positions) != source:
            raise ValueError(
                f"kv_source_layers has {source} for layer {layer}; it must be the latest source before it that has the "
                f"same entry in no_rope_layers: {latest.get(has_positions, 'there is none')}"
            )
        if source in sources[layer + 1 :]:
            latest[has_positions] = source


def _load_decoder(parts: Parts, num_layers: int) -> Decoder:
    """Load the decoder, and the logarithms of the factors of RoPE's frequencies."""
    fill(parts.model.model.rotary_emb.alpha, parts.values("model.rotary_emb.alpha"))
    decoder = load_decoder(parts, num_layers)
    layers: list[Any] = [block.attention for block in decoder.blocks]
    for layer, source in zip(layers, parts.model.config.kv_source_layers, strict=True):
        layer.kv_scale = layers[source].kv_scale  # because the cache is the source's
    return decoder


MISTRAL_LARGE4 = _MistralLarge4(
    "MistralLarge4Text",
    Routing(scoring="softmax"),
    check_attention=_check,
    load_decoder=_load_decoder,
    rules=_RULES,
    names=_NAMES,
    no_mtp="; Mistral Large 4 has a DSpark model instead, and this module (mtp_dspark) is not computed",
    rope_interleaved=True,
)
