"""Dense or sparse MLA over the projections and weights of another engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.mla.fp8_scales import KV_SCALE_NAMES, Q_SCALE_NAMES
from dcpmla.attention.mla.layer import MLAAttention
from dcpmla.attention.placement import Placement
from dcpmla.config import MLAConfig
from dcpmla.integrations.external.indexer import ExternalIndexer, IndexerModules
from dcpmla.integrations.external.linear import ExternalLinear, Projection, external_norm, external_parameters
from dcpmla.parallel.formats import BLOCK, Quantized
from dcpmla.parallel.linear import Linear, Weight
from dcpmla.parallel.quantized import PlainRows, unpack


@dataclass(frozen=True, kw_only=True)
class MLAModules:
    """The projections of one rank's layer, any callables, and the weights that attention reads directly.

    Attributes:
        down_proj: Projection [T, hidden] -> [T, Lq + L + R]: query latent (none without q_lora_rank), latent, rope part
            of the key, before their norms.
        q_proj: Projection of q_c [T, Lq] after its norm, or [T, hidden] without q_lora_rank -> [T, h (P + R)], not
            rotated, in new memory: prefill may rotate it in place. With dcp_q_replicate h are the whole DCP group's
            heads.
            With query_gates its input is [T, 2 Lq], the latent before its norm last, and each head has V more columns.
        q_a_layernorm: Weight [Lq]; None without q_lora_rank.
        kv_a_layernorm: Weight [L].
        w_kv_b: Rows [h (P + V), L] of kv_b_proj for this rank's heads, which attention absorbs; with dcp_q_replicate or
            dcp_project_before_merge for the whole DCP group's heads. In fp8 where P and V are multiples of 128.
        o_proj: Projection [T, h V] -> [T, hidden], including any sum over the TP ranks: the layer returns its result
            unchanged.
        sinks: Logits [h] of this rank's own heads, float32; None without has_sinks.
        k_pe_layernorm: Weight [R]; None without norms_k_pe.
        indexer: Projections of the indexer of sparse MLA, which a layer with skip_topk does not run. None in dense MLA,
            or for an indexer whose weights the layer loads itself.
    """

    down_proj: Projection
    q_proj: Projection
    q_a_layernorm: Tensor | None
    kv_a_layernorm: Tensor
    w_kv_b: Tensor | Quantized
    o_proj: Projection
    sinks: Tensor | None = None
    k_pe_layernorm: Tensor | None = None
    indexer: IndexerModules | None = None

    def check(self, config: MLAConfig, num_heads: int, num_held: int) -> None:
        """Raise ValueError for weights that do not match the config, num_heads own heads and num_held of kv_b_proj."""
        if config.has_query_factors:
            raise ValueError("config.has_query_factors is True, but modules hold no factors; it must be False")
        if config.num_gates:
            raise ValueError(f"config.num_gates is {config.num_gates}, but modules hold no gates; it must be 0")
        if config.input_parts != 1:
            raise ValueError(
                f"config.input_parts is {config.input_parts}, but an engine hands in one part; it must be 1"
            )
        widths = config.qk_nope_head_dim, config.v_head_dim
        codes, scales = unpack(self.w_kv_b)
        for name, weight, expected in (
            ("q_a_layernorm", self.q_a_layernorm, None if config.q_lora_rank is None else (config.q_lora_rank,)),
            ("kv_a_layernorm", self.kv_a_layernorm, (config.kv_lora_rank,)),
            ("w_kv_b", codes, (num_held * sum(widths), config.kv_lora_rank)),
            ("sinks", self.sinks, (num_heads,) if config.has_sinks else None),
            ("k_pe_layernorm", self.k_pe_layernorm, (config.qk_rope_head_dim,) if config.norms_k_pe else None),
        ):
            found = None if weight is None else tuple(weight.shape)
            if found != expected:
                raise ValueError(f"{name} has shape {found}; the config and the heads of this rank ask for {expected}")
        if self.sinks is not None and self.sinks.dtype != torch.float32:
            raise ValueError(f"sinks is {self.sinks.dtype}; attention reads torch.float32")
        if scales is not None and any(width % BLOCK for width in widths):
            raise ValueError(f"w_kv_b is in fp8; heads of {widths} values share blocks of {BLOCK}: give its values")
        if self.indexer is not None:
            self.indexer.check(config)


class ExternalAttention(MLAAttention):
    """`MLAAttention` over an engine's projections and weights; nothing is copied.

    `load_weights` reads only the scales of the cache and of queries, and an indexer's weights if modules have none.

    Args:
        config, placement, skip_topk: Arguments of `MLAAttention`.
        modules: Projections and weights of this rank, which the engine has made and loaded.
    Raises:
        ValueError: Modules do not match the config and the heads of this rank, or a reason that `MLAAttention`
            documents.
    """

    def __init__(self, config: MLAConfig, placement: Placement, modules: MLAModules, skip_topk: bool = False) -> None:
        super().__init__(config, placement, skip_topk or modules.indexer is not None)
        modules.check(config, self.num_heads, self.kv_heads.count)
        self.fused_qkv_a_proj, self.q_b_proj = ExternalLinear(modules.down_proj), ExternalLinear(modules.q_proj)
        if modules.q_a_layernorm is not None:
            self.q_a_layernorm = external_norm(modules.q_a_layernorm, config.rms_norm_eps)
        self.kv_a_layernorm = external_norm(modules.kv_a_layernorm, config.rms_norm_eps)
        if modules.k_pe_layernorm is not None:
            self.k_pe_layernorm = external_norm(modules.k_pe_layernorm, config.rms_norm_eps)
        if modules.sinks is not None:
            external_parameters(self, sinks=modules.sinks)
        codes, scales = unpack(modules.w_kv_b)
        kv_b_proj = Linear(codes.shape[1], codes.shape[0], device="meta", dtype=modules.kv_a_layernorm.dtype)
        self.kv_b_proj = external_parameters(kv_b_proj, weight=codes)
        self.kv_b_proj.weight_scale = scales
        self.o_proj = ExternalLinear(modules.o_proj)
        if modules.indexer is not None and not skip_topk:
            self.indexer = ExternalIndexer(config, placement, modules.indexer)

    def make_parameters(self, new: dict[str, Any]) -> None:
        """Make nothing; the engine has."""

    def project_hidden(self, hidden_states: PlainRows) -> tuple[Tensor | None, Tensor]:
        """Return queries and latents (`AttentionWeights.project_hidden`), each of the engine's own projection."""
        down = self.fused_qkv_a_proj(hidden_states)
        return None if self.config.q_lora_rank is not None else self.q_b_proj(hidden_states), down

    def load_parameters(self, weights: Mapping[str, Weight]) -> None:
        """Raise ValueError for weights other than scales, and those of an indexer."""
        if held := [n for n in weights if n not in KV_SCALE_NAMES + Q_SCALE_NAMES and not n.startswith("indexer.")]:
            raise ValueError(f"weights have {held[0]!r}, but the layer's modules hold its weights; give scales alone")
