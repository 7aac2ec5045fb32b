"""Routed experts: a token's weighted sum over the experts that its router chose, with weights as they are shipped."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dcpmla.cache.formats import FP8
from dcpmla.comm.terms import Partial, Terms
from dcpmla.model.calls import RoutedRows
from dcpmla.model.glu import SWIGLU, Glu, activate
from dcpmla.operators import operator
from dcpmla.parallel.by_rows import by_rows
from dcpmla.parallel.fixed import multiply_rows
from dcpmla.parallel.fp8 import runs_fp8
from dcpmla.parallel.quantized import (
    BLOCK,
    GROUP,
    AnyWeight,
    BlockFp8,
    GroupFp4,
    GroupInt4,
    NormedRows,
    PlainRows,
    dequantize,
    plain,
    unpack,
)

# Few tokens are not sorted by experts: the second product adds a token's terms. A few more are not, either, if they
# hardly share experts, whose weights would otherwise be read again.
_FEW_TOKENS, _MORE_TOKENS, _EXPERTS_PER_ROUTE = 2, 4, 6
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Dtypes of codes and of scales, and rows and columns that share a scale.
_FORMATS: dict[type, tuple[torch.dtype, torch.dtype, int, int]] = {
    BlockFp8: (FP8, torch.float32, BLOCK, BLOCK),
    GroupFp4: (torch.uint8, torch.uint8, 1, GROUP),
    GroupInt4: (torch.uint8, torch.bfloat16, 1, GROUP),
}
_KINDS = {scales: kind for kind, (_, scales, *_) in _FORMATS.items()}


class ExpertWeights(NamedTuple):
    """The weights of a rank's E experts or slices of experts, both in one format.

    Attributes:
        gate_up: [E, 2 I, H]: rows 0 to I - 1 of an expert are the gate, I to 2 I - 1 the up projection; in the model's
            dtype, BlockFp8 (I and H multiples of 128), GroupFp4 or GroupInt4 (of 32).
        down: [E, H, I].
    """

    gate_up: AnyWeight
    down: AnyWeight

    @property
    def takes_quantized(self) -> bool:
        """True if quantized rows save work: the weights are fp8, on a device that would quantize other rows."""
        return isinstance(self.gate_up, BlockFp8) and runs_fp8(self.gate_up.codes.device)


def compute_experts(
    x: PlainRows,
    expert_ids: Tensor,
    expert_weights: Tensor,
    weights: ExpertWeights,
    glu: Glu = SWIGLU,
    num_experts: int | None = None,
    is_deterministic: bool = False,
) -> Partial:
    """Return each token's weighted sum over its experts of down(glu(gate, up)), or the terms of these sums.

    GPUs multiply block fp8 in e4m3: x and glu(gate, up) are quantized in groups of 128
    (`attention/output/formats.py: write_fp8_groups`). Elsewhere, and for 4 bits, weights are dequantized as they are
    used; GPUs round `GroupInt4` weights to bfloat16. Equal inputs give equal bits. Nothing is read back to the host
    on a GPU.

    Args:
        x: [T, H], bfloat16, float16 or float32; `NormedRows` where `ExpertWeights.takes_quantized`.
        expert_ids: int32 [T, k]; ids outside [0, E) are ignored: other ranks' experts, LongCat's zero experts.
        expert_weights: float32 [T, k].
        num_experts: Number of experts over all ranks that share the routes; None for E. Kernels are chosen by it.
        is_deterministic: Whether a row's bits depend on no other row (`parallel.fixed`); not in groups of 32.
    Returns:
        [T, H] in x's dtype: terms unless they are few, whose sum is in float32. glu(gate, up), which takes the
        expert's weight, is rounded to x's dtype, and so is each term that is returned.
    Raises:
        ValueError: Shapes, dtypes or devices do not match.
    """
    rows, quantized = plain(x), x.quantized if isinstance(x, NormedRows) else None
    _check(rows, expert_ids, expert_weights, weights)
    if expert_ids.numel() == 0:
        return torch.zeros_like(rows)
    codes = *unpack(weights.gate_up), *unpack(weights.down)
    num_experts, (num_tokens, top_k) = num_experts or len(codes[0]), expert_ids.shape
    is_few = num_tokens <= _FEW_TOKENS
    is_few |= num_tokens <= _MORE_TOKENS and num_tokens * top_k * _EXPERTS_PER_ROUTE <= num_experts
    routed = rows, quantized, expert_ids, expert_weights
    out = _compute(RoutedRows(*routed, *codes, glu, num_experts, is_few, is_deterministic))
    return out if is_few and not is_deterministic else Terms(out, expert_ids.contiguous(), len(codes[0]))


@operator(
    "experts",
    kernel="dcpmla.model.kernels.experts:compute_experts",
    fake=RoutedRows.new_result,
    runs=lambda call: call.x.is_cuda and (call.gate_up.dtype != FP8 or runs_fp8(call.x.device)),
)
def _compute(call: RoutedRows) -> Tensor:
    """Return the terms [T k, H] of experts that are here, or their sums [T, H] (`RoutedRows.new_result`)."""
    x, _, expert_ids, expert_weights, gate_up, gate_up_scales, down, down_scales, glu, *_ = call
    is_deterministic, terms = call.is_deterministic, torch.zeros(*expert_ids.shape, x.shape[1], device=x.device)
    for expert in expert_ids.unique().tolist():
        if 0 <= expert < len(down):
            tokens, routes = (expert_ids == expert).nonzero(as_tuple=True)
            gate_up_values = _values(gate_up, gate_up_scales, expert)
            down_values = _values(down, down_scales, expert)
            linear = multiply_rows if is_deterministic else functional.linear
            gate, up = linear(x[tokens].float(), gate_up_values).chunk(2, -1)
            act = functools.partial(activate, glu=glu)
            h = by_rows(act, gate, up) if is_deterministic else act(gate, up)
            h = h * expert_weights[tokens, routes, None]
            terms[tokens, routes] = linear(h.to(x.dtype).float(), down_values)
    return (terms.sum(1) if call.is_few and not is_deterministic else terms.flatten(0, 1)).to(x.dtype)


def _values(codes: Tensor, scales: Tensor | None, expert: int) -> Tensor:
    """Return one expert's matrix in float32."""
    if scales is None:
        return codes[expert].float()
    return dequantize(_KINDS[scales.dtype](codes[expert], scales[expert]), torch.float32)


def _check(x: Tensor, expert_ids: Tensor, expert_weights: Tensor, weights: ExpertWeights) -> None:
    if x.ndim != 2 or x.dtype not in _DTYPES:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; expected [T, H] of bfloat16, float16 or float32")
    if expert_ids.dtype != torch.int32 or expert_ids.ndim != 2 or len(expert_ids) != len(x):
        raise ValueError(
            f"expert_ids is {expert_ids.dtype} {tuple(expert_ids.shape)}; expected int32 [{len(x)}, k], a row a token"
        )
    if expert_weights.dtype != torch.float32 or expert_weights.shape != expert_ids.shape:
        raise ValueError(
            f"expert_weights is {expert_weights.dtype} {tuple(expert_weights.shape)}; expected float32 of "
            f"{tuple(expert_ids.shape)}, as expert_ids"
        )
    if len({Tensor if isinstance(weight, Tensor) else type(weight) for weight in weights}) > 1:
        raise ValueError(
            f"gate_up is {type(weights.gate_up).__name__}, down {type(weights.down).__name__}; expected one format"
        )
    shapes = {name: _shape(name, getattr(weights, name), x.dtype) for name in ("down", "gate_up")}
    num_experts, _, width = shapes["down"]
    expected = {"gate_up": (num_experts, 2 * width, x.shape[1]), "down": (num_experts, x.shape[1], width)}
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise ValueError(
                f"{name} is {shape}; expected {expected[name]} of x {tuple(x.shape)} and down {shapes['down']}"
            )
    for tensor in (expert_ids, expert_weights, *(unpack(weight)[0] for weight in weights)):
        if tensor.device != x.device:
            raise ValueError(f"x is on {x.device}, but its experts, or what chooses them, on {tensor.device}")


def _shape(name: str, weight: AnyWeight, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return [E, N, K] of a weight.

    Raises:
        ValueError: Its format does not allow its dtypes or scales.
    """
    if isinstance(weight, Tensor):
        if weight.dtype != dtype or weight.ndim != 3:
            raise ValueError(f"{name} is {weight.dtype} {tuple(weight.shape)}; expected [E, N, K] of {dtype}, as x")
        num_experts, num_rows, num_cols = weight.shape
        return num_experts, num_rows, num_cols
    codes_dtype, scales_dtype, block_rows, block_cols = _FORMATS[type(weight)]
    (num_experts, num_rows, num_cols), scales = weight.codes.shape, weight.scales
    num_cols *= 1 if codes_dtype == FP8 else 2
    if num_rows % block_cols or num_cols % block_cols:
        raise ValueError(f"{name} has {num_rows} x {num_cols} values an expert; scales need multiples of {block_cols}")
    shape = num_experts, num_rows // block_rows, num_cols // block_cols
    if (weight.codes.dtype, scales.dtype, scales.shape) != (codes_dtype, scales_dtype, shape):
        raise ValueError(
            f"{name} has codes {weight.codes.dtype} {tuple(weight.codes.shape)} and scales {scales.dtype} "
            f"{tuple(scales.shape)}; expected {codes_dtype} and {scales_dtype} {shape}"
        )
    return num_experts, num_rows, num_cols
