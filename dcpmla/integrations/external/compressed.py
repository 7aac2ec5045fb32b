"""DeepSeek-V4's attention over the projections and weights of another engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dcpmla.attention.layers.compressed.config import CompressedConfig, LayerKind
from dcpmla.attention.layers.compressed.layer import CompressedAttention
from dcpmla.attention.layers.compressed.weights import CompressorWeights
from dcpmla.attention.placement import Placement
from dcpmla.integrations.external.linear import ExternalLinear, Projection, check_parts, external_parameters
from dcpmla.parallel.linear import Weight


@dataclass(frozen=True, kw_only=True)
class CompressorModules:
    """The weights of a compressor that pools tokens into entries, or into index keys, [D].

    Attributes:
        bias: Bias of the gates by their token's position in its span, float32 [ratio, A D], "position_bias" or "ape" in
            checkpoints; zeros if the model has none. A is 2 in layers whose entries overlap, else 1.
        norm: Weight of the entries' RMSNorm, float32 [D].
    """

    bias: Tensor
    norm: Tensor


@dataclass(frozen=True, kw_only=True)
class CompressedModules:
    """The projections of one rank's layer, any callables, and the weights that attention reads directly.

    An indexer's kernels expect the rotated columns first, while checkpoints put them last. An engine either reorders
    the rows of its weights when it loads them, or passes the outputs of its projections through
    `external.indexer.rotated_first`: index_q_proj's, the indexer's values and gates, and index_compressor's weights.
    Weights in blocks of 128 x 128 keep their blocks if Di is a multiple of 128.

    Dims: T tokens, h heads and G groups of this rank; Lq, D the widths of query latent and rows; Hi, Di the indexer's
    heads and their width; A as in `CompressorModules`.

    Attributes:
        down_proj: Projection of hidden states [T, hidden] to parts (`CompressedWeights.down_widths`), each of any row
            stride with contiguous columns. A layer leaves out the parts that its kind does not use.
            First, the query latent and the shared row before their norms, [T, Lq + D] in the layer's dtype.
            Second, values, then gates of the entries' compressor [T, 2 A D], with a ratio of 1 values alone, any float
            dtype. Entries keep this dtype until they are cached.
            Third, values, then gates of the indexer's compressor [T, 2 A Di], any float dtype.
            Last, weights of the indexer's heads [T, Hi], any float dtype.
        q_proj: Projection of the query latent after its norm [T, Lq] -> [T, h D] in new memory, for the heads' norm and
            RoPE are computed in place. With dcp_q_replicate h are the whole DCP group's heads, except in a layer of
            windows alone.
        q_norm, kv_norm: Weights of the norms of the query latent [Lq] and of the shared row [D], float32.
        sinks: Logits of this rank's heads [h], float32.
        compressor: Weights of the entries' compressor; None in a layer that writes no entries.
        index_compressor: Weights of the indexer's compressor; None in a layer without one.
        index_q_proj: Projection of the query latent after its norm -> [T, Hi Di]; None in a layer without an indexer.
        index_k_proj, index_k_norm: Projection of entries [T, D], in the dtype of the second part, to index keys
            [T, Di], and the weight of the keys' norm, float32 [Di]; None unless keys are projected from entries
            (has_entry_keys).
        o_a_proj: Projection of each group of heads [T, h D] -> [T, G o_lora_rank].
        o_b_proj: Projection [T, G o_lora_rank] -> [T, hidden], including any sum over the TP ranks: the layer returns
            its result unchanged.
    """

    down_proj: Callable[[Tensor], tuple[Tensor, ...]]
    q_proj: Projection
    q_norm: Tensor
    kv_norm: Tensor
    sinks: Tensor
    compressor: CompressorModules | None = None
    index_compressor: CompressorModules | None = None
    index_q_proj: Projection | None = None
    index_k_proj: Projection | None = None
    index_k_norm: Tensor | None = None
    o_a_proj: Projection
    o_b_proj: Projection

    def check(self, config: CompressedConfig, kind: LayerKind, num_heads: int) -> None:
        """Raise ValueError for modules that do not match a layer of that kind with num_heads heads on this rank."""
        width, index_width, num_halves = config.head_dim, config.indexer.head_dim, config.num_halves(kind)
        writes, has_indexer = kind.ratio > 0 and kind.writes, kind.has_indexer
        has_key_proj = has_indexer and config.has_entry_keys and writes
        pools_keys = has_indexer and not config.has_entry_keys
        for name, is_used, expected in (
            ("q_norm", True, (config.q_lora_rank,)),
            ("kv_norm", True, (width,)),
            ("sinks", True, (num_heads,)),
            ("compressor", writes, ((kind.ratio, num_halves * width), (width,))),
            ("index_compressor", pools_keys, ((kind.ratio, num_halves * index_width), (index_width,))),
            ("index_q_proj", has_indexer, "a projection"),
            ("index_k_proj", has_key_proj, "a projection"),
            ("index_k_norm", has_key_proj, (index_width,)),
        ):
            module, needed = _describe(getattr(self, name)), expected if is_used else None
            if module != needed:
                raise ValueError(f"{name} is {module}; the config and a layer of {kind} ask for {needed}")


def _describe(module: Tensor | CompressorModules | Projection | None) -> object:
    """Return a weight's shape, the shapes of a compressor's bias and norm, or what else it is."""
    if isinstance(module, CompressorModules):
        return tuple(module.bias.shape), tuple(module.norm.shape)
    if isinstance(module, Tensor):
        return tuple(module.shape)
    return None if module is None else "a projection"


class ExternalCompressedAttention(CompressedAttention):
    """`CompressedAttention` over an engine's projections and weights; nothing is copied, and `load_weights` refuses.

    Args:
        config, kind, placement, ring: Arguments of `CompressedAttention`.
        modules: Projections and weights of this rank, which the engine has made and loaded.
    Raises:
        ValueError: Modules do not match the config and kind, or a reason that `CompressedAttention` documents.
    """

    def __init__(
        self,
        config: CompressedConfig,
        kind: LayerKind,
        placement: Placement,
        modules: CompressedModules,
        ring: int = 0,
    ) -> None:
        super().__init__(config, kind, placement, ring)
        modules.check(config, kind, self.num_heads)
        self._external = modules
        external_parameters(self, q_norm=modules.q_norm, kv_norm=modules.kv_norm, sinks=modules.sinks)
        self.q_b_proj = ExternalLinear(modules.q_proj)
        self.o_a_proj, self.o_b_proj = ExternalLinear(modules.o_a_proj), ExternalLinear(modules.o_b_proj)
        if modules.compressor is not None:
            self.compressor = external_compressor(modules.compressor)
        if modules.index_compressor is not None:
            self.index_compressor = external_compressor(modules.index_compressor)
        if modules.index_q_proj is not None:
            self.index_q_proj = ExternalLinear(modules.index_q_proj)
        if modules.index_k_proj is not None and modules.index_k_norm is not None:
            self.index_k_proj = ExternalLinear(modules.index_k_proj)
            external_parameters(self, index_k_norm=modules.index_k_norm)

    def make_parameters(self, new: dict[str, Any]) -> None:
        """Make nothing; the engine has."""

    def down_project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of the down-projection [T, ..], as many and as wide as `down_widths`."""
        parts = self._external.down_proj(hidden_states)
        check_parts(parts, len(hidden_states), self.down_widths)
        return parts

    def load_weights(self, weights: Mapping[str, Weight]) -> None:
        """Raise ValueError."""
        raise ValueError("the layer has modules, whose weights are an engine's; load_weights reads none")


def external_compressor(modules: CompressorModules) -> CompressorWeights:
    """Return a compressor by an engine's weights."""
    weights = CompressorWeights(len(modules.bias), 1, len(modules.norm), "meta")
    return external_parameters(weights, bias=modules.bias, norm=modules.norm)
