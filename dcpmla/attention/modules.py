"""Projections that another engine passes to the layer, instead of weights that the layer loads itself."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dcpmla.attention.sparse.modules import IndexerModules
from dcpmla.config import MLAConfig
from dcpmla.parallel.fp8 import AnyRows, plain
from dcpmla.parallel.linear import Linear, RowParallelLinear
from dcpmla.parallel.quantized import BLOCK, BlockFp8, unpack

Projection = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class MLAModules:
    """The projections of one rank's layer, any callables, and the weights that attention reads directly.

    Attributes:
        down_proj: Projection [T, hidden] -> [T, Lq + L + R]: query latent (none without q_lora_rank), latent, rope part
            of the key, before their norms.
        q_proj: Projection of q_c [T, Lq] after its norm, or [T, hidden] without q_lora_rank -> [T, h (P + R)], not
            rotated, in new memory: prefill rotates it in place. With dcp_q_replicate h are the whole DCP group's heads.
            With query_gates its input is [T, 2 Lq], the latent before its norm last, and each head has V more columns.
        q_a_layernorm: Weight [Lq]; None without q_lora_rank.
        kv_a_layernorm: Weight [L].
        w_kv_b: Rows [h (P + V), L] of kv_b_proj for this rank's heads, which attention absorbs; with dcp_q_replicate or
            dcp_project_before_merge for the whole DCP group's heads. `BlockFp8` where P and V are multiples of 128.
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
    w_kv_b: Tensor | BlockFp8
    o_proj: Projection
    sinks: Tensor | None = None
    k_pe_layernorm: Tensor | None = None
    indexer: IndexerModules | None = None

    def check(self, config: MLAConfig, num_heads: int, num_held: int) -> None:
        """Raise ValueError for weights that do not match the config, num_heads own heads and num_held of kv_b_proj."""
        if config.has_query_factors:
            raise ValueError("config.has_query_factors is True, but modules hold no factors; it must be False")
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
            raise ValueError(f"w_kv_b is BlockFp8; heads of {widths} values share blocks of {BLOCK}: give its values")
        if self.indexer is not None:
            self.indexer.check(config)


class GivenLinear(RowParallelLinear):
    """A linear layer that calls an engine's projection and holds no weight."""

    def __init__(self, projection: Projection) -> None:
        nn.Module.__init__(self)  # skips RowParallelLinear's constructor, which would make a weight
        self.projection, self.takes_quantized = projection, False

    def forward(self, x: AnyRows) -> Tensor:
        return self.projection(plain(x))

    def product(self, x: AnyRows, rows: slice = slice(None)) -> Tensor:
        """Return the columns of the projection's output that the given rows of its weight make."""
        return self.projection(plain(x))[..., rows]

    def partial(self, x: AnyRows) -> Tensor:
        """Return the projection's result; the engine decides whether it is summed over the TP ranks."""
        return self.projection(plain(x))


def given_norm(weight: Tensor, eps: float) -> nn.RMSNorm:
    """Return a norm that uses a weight without copying it."""
    norm = nn.RMSNorm(weight.shape[0], eps, device="meta", dtype=weight.dtype)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def given_layer_norm(weight: Tensor, bias: Tensor) -> nn.LayerNorm:
    """Return a norm that uses weights without copying them; its epsilon is the caller's."""
    norm = nn.LayerNorm(weight.shape[0], device="meta", dtype=weight.dtype)
    norm.weight, norm.bias = (nn.Parameter(part, requires_grad=False) for part in (weight, bias))
    return norm


def given_weight(weight: Tensor | BlockFp8, dtype: torch.dtype) -> Linear:
    """Return a linear layer that uses a weight without copying it; its products are in dtype."""
    codes, scales = unpack(weight)
    linear = Linear(codes.shape[1], codes.shape[0], device="meta", dtype=dtype)
    linear.weight = nn.Parameter(codes, requires_grad=False)
    linear.weight_scale = scales
    return linear


def rotated_first(x: Tensor, head_dim: int, rope_dim: int) -> Tensor:
    """Return x [.., n head_dim] with the last rope_dim of each head_dim columns first, where an indexer expects them.

    Rows of a weight are reordered as columns of its transpose.
    """
    return x.unflatten(-1, (-1, head_dim)).roll(rope_dim, -1).flatten(-2)


def check_parts(parts: tuple[Tensor, ...], num_rows: int, widths: list[int]) -> None:
    """Raise ValueError unless an engine's down-projection returned parts [num_rows, width] with contiguous columns."""
    expected = [(num_rows, width) for width in widths]
    if [tuple(part.shape) for part in parts] != expected or any(part.stride(1) != 1 for part in parts):
        returned = [(tuple(part.shape), part.stride()) for part in parts]
        raise ValueError(f"down_proj returns shapes and strides {returned}; expected {expected}, columns of stride 1")
