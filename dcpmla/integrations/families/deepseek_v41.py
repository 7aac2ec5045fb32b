"""The text model of DeepSeek-V4.1: layers that share entries and selections, over delayed streams.

transformers has no such model; its model of DeepSeek-V4, with the weights of V4.1's attention, has the shapes.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from dcpmla.attention.layers.compressed.spec import compressed_stack
from dcpmla.attention.stack import Stack
from dcpmla.integrations.families.deepseek_v4 import V4_NAMES
from dcpmla.integrations.families.deepseek_v41_config import RAW_RULES, check_raw, check_shared, shared_config
from dcpmla.integrations.families.family import Family
from dcpmla.integrations.families.names import name_rules
from dcpmla.integrations.families.routing import Routing
from dcpmla.integrations.families.streams import load_streams
from dcpmla.integrations.ngrams import NgramSizes, add_memories, load_memories
from dcpmla.integrations.parts import Parts
from dcpmla.model.mixing import Constants
from dcpmla.model.stream_decoder import StreamDecoder
from dcpmla.model.streams import DelayedCollapse
from dcpmla.parallel.linear import read_weight

_INDEXER_NAMES = name_rules((r"\.indexer\.wk\.", ".indexer.k_proj."), (r"\.indexer\.k_norm\.", ".indexer.kv_norm."))
_MODEL_TYPE = "deepseek_v41_text"
_NOT_QUANTIZED = "self_attn.compressor.indexer.k_proj"


@dataclass(frozen=True)
class _DeepseekV41(Family):
    """DeepSeek-V4.1's text model."""

    def read_config(self, raw: dict[str, Any]) -> Any:
        """Return transformers' config of DeepSeek-V4 with the fields of V4.1."""
        config = super().read_config(raw)
        config.model_type = _MODEL_TYPE
        return config

    def translate(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the fields for layers with windows alone, because transformers refuses these ratios."""
        check_raw(raw)
        fields = raw | {"entry_ratios": raw["compress_ratios"], "num_hash_layers": 0}
        return fields | {"layer_types": ["sliding_attention"] * raw["num_hidden_layers"], "compress_ratios": None}

    def attention(self, config: Any, has_mtp: bool = False) -> Stack:
        """Return the attention of all layers."""
        return compressed_stack(shared_config(config), bool(getattr(config, "engram_layer_ids", None)))

    def extend(self, model: Any) -> None:
        """Add the weights of entries, indexers and memories; the head has no hyper-connection."""
        del model.model.hc_head
        config = model.config
        for layer, kind in zip(model.model.layers, shared_config(config).layer_kinds, strict=True):
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


def _load_delayed_streams(parts: Parts, num_layers: int) -> StreamDecoder:
    """Load the decoder."""
    config = parts.model.config
    constants = Constants(config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters, delays=True)
    norm = read_weight(parts.weights, "model.norm.weight", (config.hidden_size,))
    to_head = DelayedCollapse(norm, config.rms_norm_eps).to(parts.placement.device)
    decoder = load_streams(parts, num_layers, constants, collapses=True, to_head=to_head)
    if getattr(config, "engram_layer_ids", None):
        load_memories(parts, decoder)
    return decoder


DEEPSEEK_V41 = _DeepseekV41(
    "DeepseekV4",
    Routing(scoring=None, group_score="max"),
    check_shared,
    _load_delayed_streams,
    rules=RAW_RULES,
    names=(*V4_NAMES, *_INDEXER_NAMES),
    no_mtp=f"; the drafts of {_MODEL_TYPE} come from a DSpark module, which is not computed",
)
