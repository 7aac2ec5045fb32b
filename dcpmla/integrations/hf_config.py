"""Attention of a Hugging Face config: what their fields mean as an `MLAConfig`, and which layers have an indexer."""

import math
from typing import Any

from dcpmla.attention.compressed.config import WINDOW_ONLY, CompressedConfig, LayerKind
from dcpmla.attention.compressed.kind import CompressedKind
from dcpmla.attention.kind import AttentionKind, DenseKind
from dcpmla.attention.sparse.kind import SparseKind
from dcpmla.config import IndexerConfig, MLAConfig, choices

# Hugging Face model types whose self-attention is MLA: DeepSeek-V2/V3's, or the sparse kind of DeepSeek-V3.2 and GLM-5.
SPARSE_MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")
MLA_MODEL_TYPES = (
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k2",
    "sarvam_mla",
    "glm4_moe_lite",
    "longcat_flash",
    "mistral4",
    "youtu",
    "axk1",
    *SPARSE_MODEL_TYPES,
)
COMPRESSED_MODEL_TYPES = ("deepseek_v4",)  # self-attention over a window and compressed entries
MODEL_TYPES = (*MLA_MODEL_TYPES, *COMPRESSED_MODEL_TYPES)
# eps of the norms of both latents. Whatever a config's rms_norm_eps is (it holds for the other norms), the modeling
# code published with DeepSeek-V2, V3 and V3.2, Kimi-K2 and LongCat, and transformers' for all families, leave these
# two at their class's default.
_LATENT_NORM_EPS = 1e-6


def read_attention(config: Any) -> MLAConfig | CompressedConfig:
    """Return the attention of a transformers config of one of MODEL_TYPES.

    Raises:
        ValueError: as `attention_config` and `compressed_config`.
    """
    is_compressed = config.model_type in COMPRESSED_MODEL_TYPES
    return compressed_config(config) if is_compressed else attention_config(config)


def attention_kind(config: Any, num_more_layers: int = 0) -> AttentionKind:
    """Return the kind of attention, with all its layers, of a transformers config of one of MODEL_TYPES.

    Args:
        num_more_layers: Number of dense layers after the config's.
    Raises:
        ValueError: A field that no attention can have.
    """
    attention = read_attention(config)
    if isinstance(attention, CompressedConfig):
        return CompressedKind(attention)
    num_layers = config.num_hidden_layers + num_more_layers
    if attention.indexer is None:
        return DenseKind(attention, num_layers)
    layers = range(num_layers)
    return SparseKind(attention, num_layers, tuple(layer for layer in layers if not skips_topk(config, layer)))


def attention_config(config: Any) -> MLAConfig:
    """Return the attention of a transformers config of one of MLA_MODEL_TYPES.

    Raises:
        ValueError: another architecture, a field that no attention can have, or layers that reuse a selection that no
            layer makes.
    Source: the attention classes of transformers; YaRN's mscale from the DeepSeek-V2 paper; LongCat's factors from its
        report.
    """
    check_model_type(config.model_type, MLA_MODEL_TYPES)
    rope = config.rope_parameters or {}
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if rope.get("rope_type", "default") != "default" and rope.get("mscale_all_dim"):
        scale *= yarn_mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
    kv_lora_scale = 1.0
    if config.model_type == "longcat_flash":
        scale *= math.sqrt(config.hidden_size / config.q_lora_rank)
        kv_lora_scale = math.sqrt(config.hidden_size / config.kv_lora_rank)
    llama_4_scaling = None
    if config.model_type == "mistral4" and rope.get("llama_4_scaling_beta"):
        llama_4_scaling = (float(rope["llama_4_scaling_beta"]), int(rope["original_max_position_embeddings"]))
    return MLAConfig(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        scale=scale,
        rms_norm_eps=_LATENT_NORM_EPS,
        rope_interleaved=getattr(config, "rope_interleave", True),
        attention_bias=config.attention_bias,
        kv_lora_scale=kv_lora_scale,
        llama_4_scaling=llama_4_scaling,
        indexer=_indexer_config(config) if config.model_type in SPARSE_MODEL_TYPES else None,
    )


def compressed_config(config: Any) -> CompressedConfig:
    """Return the attention of a transformers config of model type deepseek_v4.

    Raises:
        ValueError: a field that no such attention can have.
    """
    kinds = {
        "sliding_attention": WINDOW_ONLY,
        "compressed_sparse_attention": LayerKind(config.compress_rates["compressed_sparse_attention"], True),
        "heavily_compressed_attention": LayerKind(config.compress_rates["heavily_compressed_attention"], False),
    }
    return CompressedConfig(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        rope_dim=config.qk_rope_head_dim,
        q_lora_rank=config.q_lora_rank,
        o_groups=config.o_groups,
        o_lora_rank=config.o_lora_rank,
        sliding_window=config.sliding_window,
        rms_norm_eps=config.rms_norm_eps,
        indexer=IndexerConfig(
            num_heads=config.index_n_heads,
            head_dim=config.index_head_dim,
            topk=config.index_topk,
            rope_interleaved=True,
        ),
        layer_kinds=tuple(kinds[name] for name in config.layer_types),
    )


def _indexer_config(config: Any) -> IndexerConfig:
    """Return the indexer of a sparse model; the config's indexer_rope_interleave overrides the family's layout.

    Source: vLLM and SGLang, which read the field; transformers ignores it (pull request 46842). GLM publishes it as
        true. DeepSeek-V3.2 has no such field, and rotates halves since its commit 8631a813.
    """
    indexer_types(config)
    interleaved = getattr(config, "indexer_rope_interleave", None)
    return IndexerConfig(
        num_heads=config.index_n_heads,
        head_dim=config.index_head_dim,
        topk=config.index_topk,
        rope_interleaved=config.model_type == "glm_moe_dsa" if interleaved is None else interleaved,
    )


def indexer_types(config: Any) -> list[str]:
    """Say for each layer whether it selects ("full") or reuses the selection before it ("shared").

    The first of these that the config has decides: indexer_types, index_topk_pattern ("FSSF"), or index_topk_freq,
    which makes every so-many-th layer after the first index_skip_topk_offset - 1 select.

    Source: GLM-5's config in transformers, whose names vLLM reads for DeepSeek-V3.2 as well.
    """
    num_layers, types, source = config.num_hidden_layers, getattr(config, "indexer_types", None), "indexer_types"
    pattern, freq = getattr(config, "index_topk_pattern", None), getattr(config, "index_topk_freq", None) or 1
    if types is None and pattern is not None:
        types, source = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern], "index_topk_pattern"
    if types is None:
        offset, source = getattr(config, "index_skip_topk_offset", None), "index_topk_freq and index_skip_topk_offset"
        first = 1 if offset is None else offset - 1
        types = ["shared" if max(layer - first, 0) % freq else "full" for layer in range(num_layers)]
    if len(types) < num_layers or types[:1] != ["full"] or set(types) - {"full", "shared"}:
        raise ValueError(
            f"model: the config's {source} give {types}; each of {num_layers} layers has one, full or shared, and the "
            f"first is full"
        )
    return types


def skips_topk(config: Any, layer: int) -> bool:
    """Return whether a layer has no indexer and attends to the selection of the layer before it."""
    return config.model_type in SPARSE_MODEL_TYPES and indexer_types(config)[layer] == "shared"


def num_index_layers(config: Any) -> int:
    """Return how many layers have an indexer, and so an index cache; 0 in a dense model."""
    if config.model_type not in SPARSE_MODEL_TYPES:
        return 0
    return sum(not skips_topk(config, layer) for layer in range(config.num_hidden_layers))


def check_model_type(model_type: str, known: tuple[str, ...] = MODEL_TYPES) -> None:
    """Raise ValueError for an architecture that is not among those known."""
    if model_type not in known:
        raise ValueError(f"model: architecture {model_type!r} is not an MLA model this runtime knows; {choices(known)}")


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention temperature for a context stretched by `factor`: 0.1 mscale ln(factor) + 1.

    Source: YaRN, section 3.4.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
