"""The text model of GLM-5-Next: linear attention and sparse MLA over pools, over several streams of the residual."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dcpmla.attention.layers.linear.config import DeltaConfig
from dcpmla.attention.layers.linear.spec import DeltaSpec
from dcpmla.attention.layers.pooled.spec import PooledSpec
from dcpmla.attention.spec import LayerSpec
from dcpmla.config import MLAConfig
from dcpmla.fields import FLAG, OBJECT, SIZE, check_fields, list_of, number, one_of, only, optional, whole
from dcpmla.integrations.config_checks import check_kinds
from dcpmla.integrations.families.hybrid import HYBRID_NAMES, HybridFamily, check_linear
from dcpmla.integrations.families.sparse import SPARSE_LAYERS, read_indexer
from dcpmla.integrations.families.streams import drop_connections, load_streams
from dcpmla.model.streams import StreamMean

_PADDING = 64  # columns of zeros where other models have k_pe: rows have the width that kernels take
_IN_FLOAT32 = ("attn_hc.fn", "ffn_hc.fn", "index_kpool_compress_ape")
_FLOOR = optional(number(-100, 0))
_RAW_RULES = {
    **dict.fromkeys(("qk_rope_head_dim", "head_dim"), only(0)),
    "mla_use_nope": only(True),  # vLLM's config has the field
    "index_kpool_always_select_tail": only(True),  # else a request's first tokens would attend to nothing
    "norm_topk_prob": FLAG,
    "index_kpool": whole(2, 1024),
    "linear_lower_bound": _FLOOR,
    "linear_attn_config": optional(OBJECT),
    "layer_types": optional(list_of(one_of(("linear_attention", "full_attention", *SPARSE_LAYERS)))),
    "mlp_layer_types": optional(list_of(one_of(("dense", "sparse")))),
    **dict.fromkeys(("linear_attn_config.num_heads", "linear_attn_config.head_dim"), SIZE),
    "linear_attn_config.short_conv_kernel_size": whole(2, 64),
    "linear_attn_config.gate_lower_bound": _FLOOR,
    "linear_attn_config.safe_gate": FLAG,
}
_STREAM_NAMES = ((r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),)


@dataclass(frozen=True)
class _Glm5Next(HybridFamily):
    """GLM-5-Next, whose layers without positions have no config of a rotary embedding."""

    def translate(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the fields without the sizes of positions, which are 0."""
        return {name: value for name, value in raw.items() if name not in ("qk_rope_head_dim", "head_dim")}

    def mla(self, config: Any) -> MLAConfig:
        """Return the geometry of layers of MLA with an indexer of pools."""
        padded = copy.copy(config)
        padded.qk_rope_head_dim = _PADDING
        topk = config.index_topk + config.index_kpool - 1
        indexer = replace(read_indexer(config), topk=topk, rope_interleaved=False, pool_size=config.index_kpool)
        return replace(
            super().mla(padded),
            softmax_scale=config.qk_nope_head_dim**-0.5,
            rms_norm_eps=config.rms_norm_eps,
            use_rope=False,
            projects_pe=False,
            indexer=indexer,
        )

    def delta(self, config: Any) -> DeltaConfig:
        """Return the geometry of layers of linear attention."""
        return replace(super().delta(config), decay_floor=config.linear_lower_bound)

    def layers(self, config: Any, mla: MLAConfig, has_mtp: bool) -> Iterable[LayerSpec]:
        """Return layers of linear attention and of sparse MLA over pools."""
        linear, index_layers = DeltaSpec(self.delta(config)), _index_layers(config)
        return (
            linear if each == "linear_attention" else PooledSpec(mla, layer in index_layers)
            for layer, each in enumerate(config.layer_types)
        )

    def extend(self, model: Any) -> None:
        """Name the weights that are held in float32; an MTP module has no streams."""
        drop_connections(model)
        model._keep_in_fp32_modules_strict = {*model._keep_in_fp32_modules_strict, *_IN_FLOAT32}


def _index_layers(config: Any) -> tuple[int, ...]:
    """Return the numbers of the layers of MLA with an indexer.

    Raises:
        ValueError: The first layer of MLA has none.
    """
    of_mla = [layer for layer, kind in enumerate(config.layer_types) if kind != "linear_attention"]
    types = config.indexer_types
    if len(types) < config.num_hidden_layers or types[of_mla[0]] != "full":
        raise ValueError(
            f"indexer_types is {types}; each of {config.num_hidden_layers} layers has one, and layer {of_mla[0]}, the "
            "first of MLA, must be full"
        )
    return tuple(layer for layer in of_mla if types[layer] == "full")


def _check(config: Any) -> None:
    """Raise ValueError for inconsistent fields of attention and of layers."""
    check_linear(config)
    check_fields({"linear_lower_bound": _FLOOR, "q_lora_rank": SIZE}, vars(config))
    if config.index_topk % config.index_kpool:
        raise ValueError(
            f"index_topk is {config.index_topk}; it must be a multiple of index_kpool {config.index_kpool}"
        )
    of_mla = (kind for kind in config.layer_types if kind != "linear_attention")
    check_kinds(config, ("linear_attention", next(of_mla, SPARSE_LAYERS[0])))
    if len(config.mlp_layer_types) != config.num_hidden_layers:
        raise ValueError(
            f"mlp_layer_types is {config.mlp_layer_types}; each of {config.num_hidden_layers} layers "
            "(num_hidden_layers) has one"
        )
    _index_layers(config)


GLM5_NEXT = _Glm5Next(
    "Glm5NextText",
    check_attention=_check,
    load_decoder=partial(load_streams, collapse=StreamMean, collapses=True),
    rules=_RAW_RULES,
    mtp_layer={"indexer_types": "full"},
    names=(*HYBRID_NAMES, *_STREAM_NAMES),
)
