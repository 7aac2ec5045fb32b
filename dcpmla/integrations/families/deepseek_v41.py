"""The text model of DeepSeek-V4.1: layers that share entries and selections, over delayed streams.

transformers has no such model; its model of DeepSeek-V4, with the weights of V4.1's attention, has the shapes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from dcpmla.attention.layers.compressed.config import WINDOW_ONLY, CandidateConfig, CompressedConfig, LayerKind
from dcpmla.attention.layers.compressed.spec import compressed_stack
from dcpmla.attention.stack import Stack
from dcpmla.fields import EVEN_SIZE, FLAG, SIZE, either, list_of, one_of, only, optional, whole
from dcpmla.integrations.config_checks import check_lengths
from dcpmla.integrations.families.deepseek_v4 import V4_NAMES
from dcpmla.integrations.families.deepseek_v4_config import check_compressed, compressed_config
from dcpmla.integrations.families.deepseek_v4_dspark import DSPARK_RULES, DSparkFamily
from dcpmla.integrations.families.routing import Routing
from dcpmla.integrations.families.streams import load_streams, mixing_constants
from dcpmla.integrations.ngrams import NgramSizes, add_memories, load_memories
from dcpmla.integrations.parts import Parts
from dcpmla.model.stream_decoder import StreamDecoder
from dcpmla.model.streams import DelayedCollapse

_INDEXER_NAMES = ((r"\.indexer\.wk\.", ".indexer.k_proj."), (r"\.indexer\.k_norm\.", ".indexer.kv_norm."))
_MODEL_TYPE = "deepseek_v41_text"
_NOT_QUANTIZED = "self_attn.compressor.indexer.k_proj"
_LAYERS = list_of(whole(0, 1023))
_SOURCES = ("kv_source_layer_ids", "index_source_layer_ids")
_BLOCKS = ("candidate_topk_blocks", "candidate_block_size")
# Without them transformers' config of DeepSeek-V4 would have its own sizes.
_NEEDED = (
    *("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "sliding_window", "rms_norm_eps"),
    *("n_routed_experts", "num_experts_per_tok", "index_n_heads", "index_head_dim", "index_topk"),
    *("compress_ratios", *_SOURCES, "candidate_source_layer_id"),
)
_RAW_RULES = {
    "head_dim": SIZE,
    **dict.fromkeys(("num_key_value_heads", "n_shared_experts", "gate_temp"), either(only(1), only(1.0))),
    "attention_bias": only(False),
    "norm_topk_prob": FLAG,
    "scoring_func": one_of(("sqrtsoftplus",)),
    "compress_ratios": list_of(whole(0, 2)),
    **dict.fromkeys(_SOURCES, _LAYERS),
    "candidate_source_layer_id": whole(-1, 1023),  # -1 for no candidate blocks
    **dict.fromkeys(_BLOCKS, SIZE),
    "index_head_dim": EVEN_SIZE,
    "engram_layer_ids": optional(_LAYERS),
    **DSPARK_RULES,
}


@dataclass(frozen=True)
class _DeepseekV41(DSparkFamily):
    """DeepSeek-V4.1's text model."""

    def complete(self, config: Any, raw: Mapping[str, Any]) -> None:
        """Name the model type in transformers' config of DeepSeek-V4, and add the DSpark module's ratios."""
        config.model_type = _MODEL_TYPE
        config.module_ratios = config.entry_ratios[config.num_hidden_layers :]

    def translate(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the fields for layers with windows alone, because transformers refuses these ratios."""
        _check_raw(raw)
        fields = raw | {"entry_ratios": raw["compress_ratios"], "num_hash_layers": 0}
        return fields | {"layer_types": ["sliding_attention"] * raw["num_hidden_layers"], "compress_ratios": None}

    def attention(self, config: Any, has_mtp: bool = False) -> Stack:
        """Return the attention of all layers."""
        geometry = self.with_block(_shared_config(config), config)
        return compressed_stack(geometry, bool(getattr(config, "engram_layer_ids", None)))

    def extend(self, model: Any) -> None:
        """Add the weights of entries, indexers and memories; the head has no hyper-connection."""
        super().extend(model)
        del model.model.hc_head
        config = model.config
        kinds = self.with_block(_shared_config(config), config).layer_kinds
        for layer, kind in zip(model.model.layers, kinds, strict=True):
            compressor, writes = nn.Module(), kind.ratio > 0 and kind.writes
            if writes:
                for name in ("kv", "gate")[: kind.ratio]:
                    setattr(compressor, f"{name}_proj", nn.Linear(config.hidden_size, config.head_dim, bias=False))
                compressor.kv_norm = nn.RMSNorm(config.head_dim)
            if kind.has_indexer:
                compressor.indexer = _new_indexer(config, writes)
            layer.self_attn.compressor = compressor
        if getattr(config, "engram_layer_ids", None):
            add_memories(model, NgramSizes.of(config))
        model._keep_in_fp32_modules = [*(model._keep_in_fp32_modules or ()), _NOT_QUANTIZED]


def _new_indexer(config: Any, has_keys: bool) -> nn.Module:
    """Return the weights of an indexer."""
    indexer, width = nn.Module(), config.index_head_dim
    indexer.q_b_proj = nn.Linear(config.q_lora_rank, config.index_n_heads * width, bias=False)
    indexer.scorer = nn.Module()
    indexer.scorer.weights_proj = nn.Linear(config.hidden_size, config.index_n_heads, bias=False)
    if has_keys:
        indexer.k_proj = nn.Linear(config.head_dim, width, bias=False)
        indexer.kv_norm = nn.RMSNorm(width)
    return indexer


def _check_raw(raw: dict[str, Any]) -> None:
    """Raise ValueError for fields of a file that are missing, and for a head narrower than its rotated part."""
    needed = _NEEDED + (_BLOCKS if raw.get("candidate_source_layer_id", -1) >= 0 else ())
    if missing := [name for name in needed if raw.get(name) is None]:
        raise ValueError(f"{missing[0]} is missing; a DeepSeek-V4.1 config has {', '.join(needed)}")
    if raw["head_dim"] < raw["qk_rope_head_dim"]:
        raise ValueError(
            f"head_dim is {raw['head_dim']}; it must be at least qk_rope_head_dim {raw['qk_rope_head_dim']}"
        )


def _shared_config(config: Any) -> CompressedConfig:
    """Return the geometry of attention of a config from `read_config`.

    Raises:
        ValueError: A field that no such attention can have.
    """
    blocks = None
    if _has_candidates(config):
        blocks = CandidateConfig(config.candidate_topk_blocks, config.candidate_block_size)
    num_layers = getattr(config, "num_main_layers", config.num_hidden_layers)
    kinds = tuple(_kind(config, layer) for layer in range(num_layers))
    geometry = replace(compressed_config(config), layer_kinds=kinds)
    return replace(geometry, norms_queries=False, has_entry_keys=True, candidates=blocks)


def _has_candidates(config: Any) -> bool:
    return config.candidate_source_layer_id >= 0


def _kind(config: Any, layer: int) -> LayerKind:
    """Return a layer's kind."""
    ratio, has_indexer = config.entry_ratios[layer], layer in config.index_source_layer_ids
    if not ratio:
        return WINDOW_ONLY
    candidates = ""
    if has_indexer and _has_candidates(config) and layer >= config.candidate_source_layer_id:
        candidates = "source" if layer == config.candidate_source_layer_id else "within"
    return LayerKind(ratio, has_indexer, layer in config.kv_source_layer_ids, not has_indexer, candidates)


def _check_shared(config: Any) -> None:
    """Raise ValueError for inconsistent fields of attention."""
    check_compressed(config)
    ratios, num_layers = config.entry_ratios, config.num_hidden_layers
    check_lengths({"compress_ratios": ratios}, ("compress_ratios",), num_layers)
    for name in _SOURCES:
        layers = getattr(config, name)
        is_right = layers == sorted({*layers}) and all(layer < num_layers and ratios[layer] for layer in layers)
        if not is_right:
            raise ValueError(
                f"{name} is {layers}; it must be ascending layers of num_hidden_layers {num_layers}, whose "
                "compress_ratios are not 0"
            )
        _check_readers(name, layers, ratios[:num_layers])
    if keyless := {*config.kv_source_layer_ids} - {*config.index_source_layer_ids}:
        raise ValueError(
            f"index_source_layer_ids is {config.index_source_layer_ids}; it must have layer {min(keyless)} of "
            "kv_source_layer_ids, whose indexer has the projection of index keys"
        )
    if _has_candidates(config):
        _check_candidates(config)
    if getattr(config, "engram_layer_ids", None):
        NgramSizes.of(config)


def _check_readers(name: str, sources: list[int], ratios: list[int]) -> None:
    """Raise ValueError unless each layer with entries comes at or after a source, whose ratio it has."""
    for layer, ratio in enumerate(ratios):
        source = max((source for source in sources if source <= layer), default=None)
        if ratio and (source is None or ratios[source] != ratio):
            raise ValueError(
                f"{name} is {sources}; for layer {layer}, whose compress_ratios is {ratio}, the latest source is "
                f"{source}, which must have the same"
            )


def _check_candidates(config: Any) -> None:
    """Raise ValueError unless candidate blocks are of an indexer, of the ratio of later ones, and hold enough."""
    source, indexers, ratios = config.candidate_source_layer_id, config.index_source_layer_ids, config.entry_ratios
    later = [layer for layer in indexers if layer > source]
    if source not in indexers or any(ratios[layer] != ratios[source] for layer in later):
        raise ValueError(
            f"candidate_source_layer_id is {source}; it must be in index_source_layer_ids {indexers}, with the "
            "compress_ratios of all later ones"
        )
    num_blocks, size = config.candidate_topk_blocks, config.candidate_block_size
    least = (num_blocks - 1) * size + 1  # the last block may have a single entry
    if config.index_topk > least:
        raise ValueError(
            f"candidate_topk_blocks is {num_blocks} and candidate_block_size {size}, which hold {least} entries or "
            f"more; they must hold index_topk {config.index_topk}"
        )


def _load_decoder(parts: Parts, num_layers: int) -> StreamDecoder:
    decoder = load_streams(parts, num_layers, partial(mixing_constants, delays=True), DelayedCollapse, collapses=True)
    if getattr(parts.model.config, "engram_layer_ids", None):
        load_memories(parts, decoder)
    return decoder


DEEPSEEK_V41 = _DeepseekV41(
    "DeepseekV4",
    Routing(scoring=None, group_score="max"),
    _check_shared,
    _load_decoder,
    rules=_RAW_RULES,
    names=(*V4_NAMES, *_INDEXER_NAMES),
    mtp_layer={"layer_types": "sliding_attention", "mlp_layer_types": "moe"},
    no_mtp=f"; the drafts of {_MODEL_TYPE} come from a DSpark module, take dspark",
    delays=True,
)
