"""LongCat, whose blocks have attention and an MLP twice and experts, and whose latents have factors."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from dcpmla.attention.mla.latent_spec import LatentSpec
from dcpmla.attention.spec import LayerSpec
from dcpmla.config import MLAConfig
from dcpmla.fields import one_of, only
from dcpmla.integrations.families.family import Family
from dcpmla.integrations.families.routing import Routing
from dcpmla.integrations.parts import Parts, Shapes, load_decoder
from dcpmla.model.block import ShortcutBlock
from dcpmla.model.moe import MoE

_RULES = {
    **dict.fromkeys(("mla_scale_q_lora", "mla_scale_kv_lora"), only(True)),
    "zero_expert_type": one_of(("identity",)),
    "attention_method": one_of(("MLA", "mla")),
    **dict.fromkeys(("router_bias", "nextn_use_scmoe"), only(False)),
    # LongCat-Flash-Lite adds embeddings of n-grams.
    **dict.fromkeys(("ngram_vocab_size_ratio", "emb_neighbor_num", "emb_split_num"), only(None)),
}
_NAMES = (  # of the MTP module, to names like DeepSeek-V3's
    (r"model\.mtp\.layers\.0\.", "model.layers.{mtp}."),
    (r"model\.mtp\.norm\.", "model.layers.{mtp}.shared_head.norm."),
    (r"\.transformer_layer\.mlp\.", ".mlp."),
    (r"norm\.m\.weight", "norm.weight"),
)


@dataclass(frozen=True)
class _Longcat(Family):
    """LongCat, whose MTP module is a plain layer of half a block's parts, outside the decoder layers."""

    def mla(self, config: Any) -> MLAConfig:
        """Return the geometry, its scales with the factors of LongCat's report."""
        mla = super().mla(config)
        scale = mla.softmax_scale * math.sqrt(config.hidden_size / config.q_lora_rank)
        return replace(mla, softmax_scale=scale, kv_lora_scale=math.sqrt(config.hidden_size / config.kv_lora_rank))

    def layers(self, config: Any, mla: MLAConfig, has_mtp: bool) -> Iterable[LayerSpec]:
        """Return dense MLA; the MTP module has one layer."""
        return (LatentSpec(mla),) * (config.num_hidden_layers + has_mtp)

    def check_mtp(self, config: Any) -> None:
        """Pass: every model has a module."""

    def with_mtp_layer(self, config: Any) -> Any:
        """Return the config unchanged."""
        return config

    def mtp_shapes(self, config: Any, block: str, of_model: Shapes) -> Shapes:
        """Return the shapes of all weights of the MTP module, some as in the first half of a block."""
        shapes = super().mtp_shapes(config, block, of_model)
        for first, own in (("self_attn.0.", "self_attn."), ("mlps.0.", "mlp.")):
            part = f"model.layers.0.{first}"
            names = [name.removeprefix(part) for name in of_model if name.startswith(part)]
            shapes |= {f"{block}.{own}{name}": of_model[part + name] for name in names}
        norms = (f"{block}.{name}_layernorm.weight" for name in ("input", "post_attention"))
        return shapes | dict.fromkeys(norms, (config.hidden_size,))


def _load_block(parts: Parts, name: str, output_norm: Tensor) -> ShortcutBlock:
    (first, layer), (second, _) = (parts.attention(f"{name}.self_attn.{number}") for number in range(2))
    experts = parts.mlp(f"{name}.mlp")
    assert isinstance(experts, MoE)
    inner = ("post_attention_layernorm.0", "input_layernorm.1", "post_attention_layernorm.1")
    norms = [*(parts.vector(f"{name}.{norm}.weight") for norm in inner), output_norm]
    mlps = parts.dense(f"{name}.mlps.0"), parts.dense(f"{name}.mlps.1")
    return ShortcutBlock(layer, (first, second), mlps, experts, norms, parts.eps, parts.reduce)


LONGCAT = _Longcat(
    "LongcatFlash",
    Routing(
        scoring="softmax",
        group_score="max",
        renormalizes=False,
        least_chosen=2,  # transformers' module drops the dim of a single expert
        weight="router.classifier.weight",
        bias="router.e_score_correction_bias",
    ),
    load_decoder=partial(load_decoder, first_norm="input_layernorm.0", load=_load_block),
    rules=_RULES,
    names=_NAMES,
)
