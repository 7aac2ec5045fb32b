"""Projections that an engine of one's own hands to the layer, in place of those that it would load itself."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dcpmla.config import MLAConfig
from dcpmla.parallel.fp8 import AnyRows, plain
from dcpmla.parallel.linear import Linear, RowParallelLinear
from dcpmla.parallel.quantized import BLOCK, BlockFp8, unpack

Projection = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class MLAModules:
    """The projections that one rank's layer computes with, any callables, and the weights that attention reads itself.

    Attributes:
        down_proj: [T, hidden] -> [T, Lq + L + R], query latent (none without q_lora_rank), latent, rope part of the
            key, before their norms.
        q_proj: q_c [T, Lq] after its norm, or [T, hidden] without q_lora_rank -> [T, h (P + R)], not rotated, in new
            memory: prefill rotates it in place. With dcp_q_replicate the heads of the whole DCP group.
        q_a_layernorm: weight [Lq]; None without q_lora_rank.
        kv_a_layernorm: weight [L].
        w_kv_b: [h (P + V), L], kv_b_proj's rows of this rank's heads, which attention absorbs; with dcp_q_replicate or
            dcp_project_before_merge those of the whole DCP group. `BlockFp8` where P and V are multiples of 128.
        o_proj: [T, h V] -> [T, hidden]. The layer returns what it returns: the sum over the TP ranks is its own.
    """

    down_proj: Projection
    q_proj: Projection
    q_a_layernorm: Tensor | None
    kv_a_layernorm: Tensor
    w_kv_b: Tensor | BlockFp8
    o_proj: Projection

    def check(self, config: MLAConfig, num_heads: int) -> None:
        """Raise ValueError for weights that are not those of num_heads heads of the config."""
        widths = config.qk_nope_head_dim, config.v_head_dim
        codes, scales = unpack(self.w_kv_b)
        q_a = None if self.q_a_layernorm is None else tuple(self.q_a_layernorm.shape)
        for name, found, expected in (
            ("q_a_layernorm", q_a, None if config.q_lora_rank is None else (config.q_lora_rank,)),
            ("kv_a_layernorm", tuple(self.kv_a_layernorm.shape), (config.kv_lora_rank,)),
            ("w_kv_b", tuple(codes.shape), (num_heads * sum(widths), config.kv_lora_rank)),
        ):
            if found != expected:
                raise ValueError(f"{name} has shape {found}; the config and the heads of this rank ask for {expected}")
        if scales is not None and any(width % BLOCK for width in widths):
            raise ValueError(f"w_kv_b is BlockFp8; heads of {widths} values share blocks of {BLOCK}: give its values")


class GivenLinear(RowParallelLinear):
    """An engine's projection, called as the layer calls its own ones. It holds no weight."""

    def __init__(self, projection: Projection) -> None:
        nn.Module.__init__(self)  # not the base's: it would make a weight
        self.projection, self.takes_quantized = projection, False

    def forward(self, x: AnyRows) -> Tensor:
        return self.projection(plain(x))

    def product(self, x: AnyRows, rows: slice = slice(None)) -> Tensor:
        """Return the columns of its output that are the given rows of its weight."""
        return self.projection(plain(x))[..., rows]

    def partial(self, x: AnyRows) -> Tensor:
        """Return what it returns: whether that is a sum over the TP ranks is up to whoever gave it."""
        return self.projection(plain(x))


def given_norm(weight: Tensor, eps: float) -> nn.RMSNorm:
    """Return a norm over a weight that stays where it is."""
    norm = nn.RMSNorm(weight.shape[0], eps, device="meta", dtype=weight.dtype)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def given_weight(weight: Tensor | BlockFp8, dtype: torch.dtype) -> Linear:
    """Return a linear layer over a weight that stays where it is, of products in dtype."""
    codes, scales = unpack(weight)
    linear = Linear(codes.shape[1], codes.shape[0], device="meta", dtype=dtype)
    linear.weight = nn.Parameter(codes, requires_grad=False)
    linear.weight_scale = scales
    return linear
