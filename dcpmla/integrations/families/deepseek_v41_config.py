"""Fields of the config of DeepSeek-V4.1's text model: their checks, and the geometry of its attention."""

from dataclasses import replace
from typing import Any

from dcpmla.attention.layers.compressed.config import WINDOW_ONLY, CandidateConfig, CompressedConfig, LayerKind
from dcpmla.fields import FLAG, LARGEST_SIZE, SIZE, either, even, list_of, one_of, only, optional, whole
from dcpmla.integrations.families.deepseek_v4_config import check_compressed, compressed_config
from dcpmla.integrations.ngrams import NgramSizes

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
RAW_RULES = {
    "num_hidden_layers": whole(1, 1024),
    "head_dim": SIZE,
    "qk_rope_head_dim": even(LARGEST_SIZE),
    **dict.fromkeys(("num_key_value_heads", "n_shared_experts", "gate_temp"), either(only(1), only(1.0))),
    "attention_bias": only(False),
    "norm_topk_prob": FLAG,
    "scoring_func": one_of(("sqrtsoftplus",)),
    "compress_ratios": list_of(whole(0, 2)),
    **dict.fromkeys(_SOURCES, _LAYERS),
    "candidate_source_layer_id": whole(-1, 1023),  # -1 for no candidate blocks
    **dict.fromkeys(_BLOCKS, SIZE),
    "index_head_dim": even(LARGEST_SIZE),
    "engram_layer_ids": optional(_LAYERS),
}


def check_raw(raw: dict[str, Any]) -> None:
    """Raise ValueError for fields of a file that are missing, and for a head narrower than its rotated part."""
    needed = _NEEDED + (_BLOCKS if raw.get("candidate_source_layer_id", -1) >= 0 else ())
    if missing := [name for name in needed if raw.get(name) is None]:
        raise ValueError(f"{missing[0]} is missing; a DeepSeek-V4.1 config has {', '.join(needed)}")
    if raw["head_dim"] < raw["qk_rope_head_dim"]:
        raise ValueError(
            f"head_dim is {raw['head_dim']}; it must be at least qk_rope_head_dim {raw['qk_rope_head_dim']}"
        )


def shared_config(config: Any) -> CompressedConfig:
    """Return the geometry of attention of a config from `read_config`.

    Raises:
        ValueError: A field that no such attention can have.
    """
    blocks = None
    if _has_candidates(config):
        blocks = CandidateConfig(config.candidate_topk_blocks, config.candidate_block_size)
    kinds = tuple(_kind(config, layer) for layer in range(config.num_hidden_layers))
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


def check_shared(config: Any) -> None:
    """Raise ValueError for inconsistent fields of attention."""
    check_compressed(config)
    ratios, num_layers = config.entry_ratios, config.num_hidden_layers
    if len(ratios) < num_layers:
        raise ValueError(
            f"compress_ratios has {len(ratios)} entries; each of {num_layers} layers (num_hidden_layers) has one"
        )
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
