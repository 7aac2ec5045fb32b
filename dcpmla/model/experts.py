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
from dcpmla.parallel.formats import BLOCK, GROUP, AnyWeight, Quantized, dequantize, format_name
from dcpmla.parallel.fp8 import runs_fp8
from dcpmla.parallel.quantized import NormedRows, PlainRows, fields, pack, plain, unpack

# Few tokens are not sorted by experts: the second product adds a token's terms. A few more are not, either, if they
# hardly share experts, whose weights would otherwise be read again.
_FEW_TOKENS, _MORE_TOKENS, _EXPERTS_PER_ROUTE = 2, 4, 6
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ExpertWeights(NamedTuple):
    """The weights of a rank's E experts or slices of experts, both in one format.

    Attributes:
        gate_up: [E, 2 I, H]: rows 0 to I - 1 of an expert are the gate, I to 2 I - 1 the up projection; in the model's
            dtype, in blocks of fp8 (I and H multiples of 128), or in 4 bits (of 32 and of the group).
        down: [E, H, I].
    """

    gate_up: AnyWeight
    down: AnyWeight

    @property
    def takes_quantized(self) -> bool:
        """True if quantized rows save work: the weights are fp8, on a device that would quantize other rows."""
        codes, scales = unpack(self.gate_up)
        return scales is not None and codes.dtype == FP8 and runs_fp8(codes.device)


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
    (`attention/output/formats.py: write_fp8_groups`). They multiply W4AFP8 in the same way if experts get many rows.
    Elsewhere, and for 4 bits, weights are dequantized as they are used; GPUs round integers' values to bfloat16. Equal
    inputs give equal bits. Nothing is read back to the host on a GPU.

    Args:
        x: [T, H], bfloat16, float16 or float32; `NormedRows` where `ExpertWeights.takes_quantized`.
        expert_ids: int32 [T, k]; ids outside [0, E) are ignored: other ranks' experts, LongCat's zero experts.
        expert_weights: float32 [T, k].
        num_experts: Number of experts over all ranks that share the routes; None for E. Kernels are chosen by it.
        is_deterministic: Whether a row's bits depend on no other row (`parallel.fixed`); not in 4 bits.
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
    codes = *fields(weights.gate_up), *fields(weights.down)
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
    x, expert_ids, expert_weights = call.x, call.expert_ids, call.expert_weights
    gate_up, down, glu, is_deterministic = pack(*call[4:8]), pack(*call[8:12]), call.glu, call.is_deterministic
    terms = torch.zeros(*expert_ids.shape, x.shape[1], device=x.device)
    for expert in expert_ids.unique().tolist():
        if 0 <= expert < len(call.down):
            tokens, routes = (expert_ids == expert).nonzero(as_tuple=True)
            gate_up_values, down_values = _values(gate_up, expert), _values(down, expert)
            linear = multiply_rows if is_deterministic else functional.linear
            gate, up = linear(x[tokens].float(), gate_up_values).chunk(2, -1)
            act = functools.partial(activate, glu=glu)
            h = by_rows(act, gate, up) if is_deterministic else act(gate, up)
            h = h * expert_weights[tokens, routes, None]
            terms[tokens, routes] = linear(h.to(x.dtype).float(), down_values)
    rows = terms.flatten(0, 1).to(x.dtype)
    return Terms(rows, expert_ids, len(call.down)).add() if call.is_few and not is_deterministic else rows


def _values(weight: AnyWeight, expert: int) -> Tensor:
    """Return one expert's matrix in float32."""
    if isinstance(weight, Tensor):
        return weight[expert].float()
    return dequantize(weight.map(lambda part: part[expert]), torch.float32)


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
    if len({None if isinstance(weight, Tensor) else weight.format.codes for weight in weights}) > 1:
        names = format_name(weights.gate_up), format_name(weights.down)
        raise ValueError("gate_up is {}, down {}; expected one format".format(*names))
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
    """Return [E, N, K] of a weight; raise ValueError if its format does not allow its dtypes or scales."""
    if isinstance(weight, Quantized):
        return _shape_of_codes(name, weight)
    if weight.dtype != dtype or weight.ndim != 3:
        raise ValueError(f"{name} is {weight.dtype} {tuple(weight.shape)}; expected [E, N, K] of {dtype}, as x")
    num_experts, num_rows, num_cols = weight.shape
    return num_experts, num_rows, num_cols


def _shape_of_codes(name: str, weight: Quantized) -> tuple[int, int, int]:
    (num_experts, num_rows, num_cols), scales, held = weight.codes.shape, weight.scales, weight.format
    num_cols *= 1 + held.is_packed
    multiple = BLOCK if held.rows > 1 else GROUP
    if num_rows % multiple or num_cols % multiple:
        raise ValueError(f"{name} has {num_rows} x {num_cols} values an expert; scales need multiples of {multiple}")
    shape = num_experts, num_rows // held.rows, num_cols // held.columns
    codes_dtype = torch.uint8 if held.is_packed else FP8
    is_group = BLOCK % held.columns == 0 and held.columns > 1
    if not is_group or (weight.codes.dtype, scales.dtype, scales.shape) != (codes_dtype, held.scales, shape):
        raise ValueError(
            f"{name} has codes {weight.codes.dtype} {tuple(weight.codes.shape)} and scales {scales.dtype} "
            f"{tuple(scales.shape)}; expected {codes_dtype} and {held.scales} {shape}"
        )
    return num_experts, num_rows, num_cols
