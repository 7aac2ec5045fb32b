"""Linear layers, and slices of a checkpoint's weights for them.

Weights are [out, in]. A `Linear` into which a caller loads only its rank's slice of the weight's rows makes a slice of
the output's columns ("column-parallel"). `RowParallelLinear` holds a slice of the weight's columns, and its outputs are
summed over the ranks.
"""

from collections.abc import Mapping
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from dcpmla.parallel.collectives import named
from dcpmla.parallel.fixed import fixed_linear, sum_in_order
from dcpmla.parallel.formats import BLOCK, AnyWeight, Quantized, can_stack, dequantize, is_block_fp8
from dcpmla.parallel.fp8 import dequantize_blocks, fp8_linear, runs_fp8
from dcpmla.parallel.group_linear import multiply_quantized
from dcpmla.parallel.quantized import AnyRows, Fp8Product, NormedRows, QuantizedRows, plain


class Weight(Protocol):
    """A whole [rows, cols] or [rows] weight that can be sliced: a Tensor, or a tensor still on disk."""

    @property
    def shape(self) -> torch.Size: ...

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> Tensor: ...


class QuantizedWeight(Weight, Protocol):
    """A [rows, cols] weight in 8 or 4 bits: indexing gives values, `stored` codes and scales (`read_linear`)."""

    def stored(self, rows: slice, cols: slice, /) -> AnyWeight: ...


class Linear(nn.Module):
    """A linear layer whose weight stays quantized if the checkpoint stores it so.

    Attributes:
        weight: Weight [out, in] in dtype, or codes; not initialized before `load`.
        weight_scale, weight_zeros, weight_factors: The other fields of `Quantized`; None for a weight in dtype.
        input_scale: Static scale of inputs, float32 [1], from the checkpoint's calibration, for callers that quantize
            an input before they pass it (`quant_for`); None if the checkpoint has none. The layer itself does not read
            it: when it quantizes a plain input, the input determines its own scales.
        takes_quantized: Whether an input that is already quantized (`QuantizedRows`, `NormedRows`) saves work: the
            weight is fp8 and the device multiplies in fp8, so the layer would quantize a plain input itself.
        is_deterministic: Whether a row's bits depend on no other row (`parallel.fixed`).
    """

    weight_scale: Tensor | None
    weight_zeros: Tensor | None
    weight_factors: Tensor | None
    input_scale: Tensor | None
    is_deterministic = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.dtype, self.takes_quantized = self.weight.dtype, False
        self.register_buffer("weight_scale", None)
        self.weight_zeros = self.weight_factors = None  # set by `load`
        self.register_buffer("input_scale", None, persistent=False)
        self.register_buffer("_arrivals", None, persistent=False)

    def load(self, *parts: AnyWeight) -> None:
        """Fill the weight with parts stacked along dim 0.

        It holds codes and scales if all parts are in one format, those of block fp8 on one grid; else values in dtype.
        """
        assert self.weight_scale is None  # weights are loaded only once
        if self._stays_quantized(parts):
            self._hold(cast(tuple[Quantized, ...], parts))
        else:
            fill(self.weight, *(unquantized(part, self.weight) for part in parts))

    def forward(self, x: AnyRows) -> Tensor:
        if self.weight_scale is None and not self.is_deterministic:
            return F.linear(plain(x), self.weight, self.bias)
        out = self.product(x)
        return out if self.bias is None else out + self.bias

    def product(self, x: AnyRows, rows: slice = slice(None)) -> Tensor:
        """Return the product of x [.., in] and the weight, or a slice of the weight's rows, without the bias."""
        if self.weight_scale is None and self.is_deterministic:
            return fixed_linear(plain(x), self.weight[rows], self.dtype)
        if self.weight_scale is None:
            return F.linear(plain(x), self.weight[rows])
        start, stop, _ = rows.indices(self.out_features)
        if not is_block_fp8(Quantized(self.weight, self.weight_scale)):
            return multiply_quantized(plain(x), self._held(rows), self._arrivals)
        if start % BLOCK:  # the rows begin inside a block
            return self.product(x)[..., rows]
        x = x.quantized if isinstance(x, NormedRows) else x
        values, scales = x if isinstance(x, QuantizedRows) else (x.flatten(0, -2), None)
        if scales is not None and scales.ndim == 1:  # one for all rows
            scales = scales.expand(len(values), values.shape[1] // BLOCK)
        blocks = self.weight_scale[start // BLOCK : -(-stop // BLOCK)]
        weight = self.weight[rows], blocks
        out = fp8_linear(Fp8Product(values, scales, *weight, self._arrivals, self.dtype, self.is_deterministic))
        return out if isinstance(x, QuantizedRows) else out.unflatten(0, x.shape[:-1])

    def _held(self, rows: slice) -> Quantized:
        """Return rows of codes and scales of groups of columns."""
        held = self.weight, cast(Tensor, self.weight_scale), self.weight_zeros, self.weight_factors
        return Quantized(*held).map(lambda part: part[rows])

    def _stays_quantized(self, parts: tuple[AnyWeight, ...]) -> bool:
        return can_stack(parts, self.in_features)

    def _hold(self, parts: tuple[Quantized, ...]) -> None:
        """Replace the weight's memory by codes, scales, and counters of programs that finished a part of a product."""
        device, num_blocks = self.weight.device, -(-self.out_features // BLOCK)
        del self.weight  # frees the weight's memory before codes are allocated
        codes, scales, self.weight_zeros, self.weight_factors = (
            torch.cat([tensor.to(device) for tensor in tensors]) if tensors[0] is not None else None
            for tensors in zip(*parts, strict=True)
        )
        self.weight, self.weight_scale = nn.Parameter(cast(Tensor, codes), requires_grad=False), scales
        self._arrivals = torch.zeros(4 * num_blocks, dtype=torch.int32, device=device)
        if is_block_fp8(parts[0]):
            columns = self.in_features // BLOCK
            padded = torch.zeros(num_blocks, -(-columns // 4) * 4, device=device)  # cuBLAS requires this layout
            padded[:, :columns] = cast(Tensor, scales)
            self.weight_scale, self.takes_quantized = padded[:, :columns], runs_fp8(device)


class RowParallelLinear(Linear):
    """A linear layer with input features sharded over the group: [T, in / size] -> [T, out], summed over the ranks.

    The all-reduce sums in the layer's dtype, as transformers' tensor parallelism does; with is_deterministic, and in
    the DCP exchange, sums are in float32.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group: ProcessGroup,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features // dist.get_world_size(group), out_features, bias, device, dtype)
        self.group = group

    def forward(self, x: AnyRows) -> Tensor:
        out = self.product(x)
        operation, is_split = "all-reduce of a row-parallel linear", dist.get_world_size(self.group) > 1
        if is_split and self.is_deterministic:
            out = sum_in_order(out, self.group, operation).to(out.dtype)
        elif is_split:
            with named(operation, self.group):
                dist.all_reduce(out, group=self.group)
        return out if self.bias is None else out + self.bias

    def partial(self, x: AnyRows) -> Tensor:
        """Return this rank's part of the sum; the group's first rank adds the bias."""
        out = self.product(x)
        return out if self.bias is None or dist.get_rank(self.group) else out + self.bias


def shard(size: int, group: ProcessGroup) -> slice:
    """Return this rank's slice of a dim of the given size."""
    part = size // dist.get_world_size(group)
    return slice(dist.get_rank(group) * part, (dist.get_rank(group) + 1) * part)


def read_weight(weights: Mapping[str, Weight], name: str, shape: tuple[int, ...], *index: slice) -> Tensor:
    """Read a named weight's values: the slice at index, or all values without one; float32 if the weight is quantized.

    Raises:
        ValueError: The weight is missing, has another shape, or has no floating-point dtype.
    """
    return _read_values(_find(weights, name, shape), name, index)


def read_linear(
    weights: Mapping[str, Weight],
    name: str,
    shape: tuple[int, int],
    rows: slice = slice(None),
    cols: slice = slice(None),
) -> AnyWeight:
    """Read a slice of a named matrix [rows, cols] in the checkpoint's format.

    Returns:
        A `Quantized`: block fp8 where the slice begins and ends at multiples of 128 (or at the matrix's end) and each
        block of 128 x 128 has one scale, formats in groups of columns where it has whole groups. Else the values,
        float32 or in the dtype of a weight that is not quantized.
    Raises:
        ValueError: Same cases as `read_weight`.
    """
    weight = _find(weights, name, shape)
    # isinstance with a protocol takes a millisecond in Python 3.11; checkpoints have tens of thousands of matrices.
    if hasattr(weight, "stored"):
        return cast(QuantizedWeight, weight).stored(rows, cols)
    return _read_values(weight, name, (rows, cols))


def _find(weights: Mapping[str, Weight], name: str, shape: tuple[int, ...]) -> Weight:
    if name not in weights:
        raise ValueError(f"checkpoint: tensor {name} is missing")
    weight = weights[name]
    if tuple(weight.shape) != shape:
        raise ValueError(
            f"checkpoint: tensor {name} has shape {tuple(weight.shape)}; the model's config asks for {shape}"
        )
    return weight


def _read_values(weight: Weight, name: str, index: tuple[slice, ...]) -> Tensor:
    part = weight[index or (slice(None),)]
    if part.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"checkpoint: tensor {name} has dtype {part.dtype}; weights may be float32, bfloat16, float16, or codes of "
            f"8 or 4 bits with their scales"
        )
    return part


def unquantized(weight: AnyWeight, target: Tensor) -> Tensor:
    """Return a plain weight unchanged, or a quantized weight's values in the dtype and on the device of `target`."""
    if isinstance(weight, Tensor):
        return weight
    weight = weight.map(lambda part: part.to(target.device))
    return dequantize_blocks(*weight[:2], target.dtype) if is_block_fp8(weight) else dequantize(weight, target.dtype)


def fill(parameter: nn.Parameter | Tensor | None, *parts: Tensor) -> None:
    """Fill a parameter with parts stacked along dim 0, converted to its dtype and device."""
    assert parameter is not None
    with torch.no_grad():
        for target, part in zip(parameter.split([part.shape[0] for part in parts]), parts, strict=True):
            target.copy_(part)
