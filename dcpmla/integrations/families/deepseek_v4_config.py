"""Fields of DeepSeek-V4's config: checks of what belongs together, and the geometry of its attention."""

from typing import Any

from dcpmla.attention.layers.compressed.config import WINDOW_ONLY, CompressedConfig, LayerKind
from dcpmla.fields import check_fields, whole
from dcpmla.indexer_config import IndexerConfig
from dcpmla.integrations.config_checks import check_rope_fields

_RATE_RULES = dict.fromkeys(("compressed_sparse_attention", "heavily_compressed_attention"), whole(2, 1 << 16))


def compressed_config(config: Any) -> CompressedConfig:
    """Return the geometry of attention of a transformers config.

    Raises:
        ValueError: A field that no such attention can have.
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


def check_compressed(config: Any) -> None:
    """Raise ValueError for inconsistent fields of attention."""
    if getattr(config, "indexer_rope_interleave", None) is False:
        raise ValueError(
            "indexer_rope_interleave is False; the indexer of this family rotates pairs, so it must be True"
        )
    check_fields(_RATE_RULES, config.compress_rates, "compress_rates.{}".format)
    if missing := _RATE_RULES.keys() - config.compress_rates.keys():
        raise ValueError(f"compress_rates lacks {min(missing)}")
    rotated, widths = config.qk_rope_head_dim, (config.head_dim, config.index_head_dim)
    if rotated % 2 or not 0 < rotated <= min(widths):
        raise ValueError(
            f"partial_rotary_factor {config.partial_rotary_factor} rotates {rotated} dims (qk_rope_head_dim); they "
            f"must be even, and at most head_dim {widths[0]} and index_head_dim {widths[1]}"
        )
    if config.num_attention_heads % config.o_groups:
        raise ValueError(
            f"o_groups is {config.o_groups}; it must divide num_attention_heads {config.num_attention_heads}"
        )
    for kind in ("main", "compress"):
        rope = config.rope_parameters[kind]
        check_rope_fields(rope, rotated, f"rope_parameters.{kind}.{{}}")
        factor = rope.get("partial_rotary_factor", 1.0)
        if int(config.head_dim * factor) != rotated:
            raise ValueError(
                f"rope_parameters.{kind}.partial_rotary_factor is {factor}; of head_dim {config.head_dim} it must "
                f"leave qk_rope_head_dim {rotated} dims"
            )
