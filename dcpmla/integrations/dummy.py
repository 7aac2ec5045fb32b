"""Random weights in the shapes and formats of a checkpoint, made where they are needed: for measuring without one."""

import hashlib
import re
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from dcpmla.hf_quantization import expert_codes, has_mxfp8, packed_codes
from dcpmla.parallel.formats import BLOCK, GROUP, AnyWeight, Quantized, dequantize
from dcpmla.parallel.linear import Weight

_STD = 0.02  # standard deviation of weights, as in initialized models
# Formats in 4 bits, with the scale of all groups.
_IN_4_BITS: dict[str, tuple[type[Quantized] | type[Quantized], float, torch.dtype]] = {
    "fp4": (Quantized, 120, torch.uint8),  # e8m0 of 2^-7: e2m1's values are within 6 x 2^-7
    "int4": (Quantized, _STD / 5, torch.bfloat16),  # integers from -8 to 7
}
# Linear layers that are published in block fp8, in models that have any.
_QUANTIZED = re.compile(r"\.layers\..*(_proj(_with_mqa)?|\.w[qko](_[ab])?)\.weight$")
_ONES = re.compile(r"norm.*weight$|\.softmax_scaling\.bias$")
_ROUTED = re.compile(r"\.experts\.\d+\.")
_NOT_QUANTIZED = re.compile(r"\.(weights_proj|compressor|eh_proj)\b")


def dummy_weights(
    shapes: Mapping[str, tuple[int, ...]], config: Any, dtype: torch.dtype, device: torch.device
) -> Mapping[str, Weight]:
    """Return weights by their names, in the formats that a transformers config names: matrices around 0, norms of 1,
    biases of 0, factors of queries of 1. A slice is the same on all ranks.
    """
    quantization, codes = getattr(config, "quantization_config", None), expert_codes(config)
    is_fp8 = quantization is not None and packed_codes(quantization) is None
    has_groups = quantization is not None and has_mxfp8(quantization)

    def new(name: str, shape: tuple[int, ...]) -> Weight:
        if name.endswith(".tid2eid"):
            return _routes(shape, shapes[name.removesuffix("tid2eid") + "weight"][0], device)
        if codes is not None and _ROUTED.search(name):
            return _DummyGroups(codes, name, shape, dtype, device)
        if is_fp8 and len(shape) == 2 and _QUANTIZED.search(name) and not _NOT_QUANTIZED.search(name):
            return (_DummyGroupFp8 if has_groups else _DummyFp8)(name, shape, dtype, device)
        return _DummyWeight(name, shape, dtype, device)

    return {name: new(name, shape) for name, shape in shapes.items()}


def _routes(shape: tuple[int, ...], num_experts: int, device: torch.device) -> Tensor:
    """Return int64 [vocabulary, k] experts of each token id, all equally often and a token's all different, so that
    batches read as many experts as a trained model's.
    """
    return torch.arange(prod(shape), device=device).view(shape) % num_experts


class _DummyWeight:
    """A weight whose slices are drawn anew each time that they are asked for."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._name, self._dtype, self._device = name, dtype, device
        self.shape = torch.Size(shape)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        if len(self.shape) == 1:
            fill = torch.ones if _ONES.search(self._name) else torch.zeros
            return fill(self.shape, dtype=self._dtype, device=self._device)[index]
        return self._draw(index).to(self._dtype) * _STD

    def _draw(self, index: tuple[slice, ...]) -> Tensor:
        """Return normally distributed numbers in the shape of a slice, in bfloat16."""
        bounds = [part.indices(size) for part, size in zip(index, self.shape, strict=False)]
        digest = hashlib.blake2b(f"{self._name}{bounds}".encode(), digest_size=8).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest, "little") >> 1)
        sizes = [len(range(*bound)) for bound in bounds] + list(self.shape[len(bounds) :])
        return torch.randn(sizes, generator=generator, dtype=torch.bfloat16, device=self._device)


class _DummyFp8(_DummyWeight):
    """A matrix in block fp8."""

    def stored(self, rows: slice, cols: slice) -> Tensor | Quantized:
        codes = self._draw((rows, cols)).to(torch.float8_e4m3fn)
        scales = torch.full([-(-size // BLOCK) for size in codes.shape], _STD, device=self._device)
        weight = Quantized(codes, scales)
        bounds = [(*part.indices(size)[:2], size) for part, size in zip((rows, cols), self.shape, strict=True)]
        is_on_grid = all(start % BLOCK == 0 and (end % BLOCK == 0 or end == size) for start, end, size in bounds)
        return weight if is_on_grid else dequantize(weight, self._dtype)


class _DummyGroupFp8(_DummyWeight):
    """A matrix in MXFP8."""

    def stored(self, rows: slice, cols: slice) -> AnyWeight:
        codes = self._draw((rows, cols)).to(torch.float8_e4m3fn)
        first, end, _ = cols.indices(self.shape[1])
        if first % GROUP or end % GROUP:
            return codes.to(self._dtype) * _STD
        exponents = torch.full((len(codes), codes.shape[1] // GROUP), 121, dtype=torch.uint8, device=self._device)
        return Quantized(codes, exponents)


class _DummyGroups(_DummyWeight):
    """A matrix in 4 bits, its columns cut between groups."""

    def __init__(self, codes: str, *args: Any) -> None:
        super().__init__(*args)
        self._kind, self._scale, self._scale_dtype = _IN_4_BITS[codes]

    def stored(self, rows: slice, cols: slice) -> AnyWeight:
        # Two codes a byte; any bits are codes.
        codes = self._draw((rows, cols))[:, ::2].contiguous().view(torch.uint8)[:, ::2].contiguous()
        shape = len(codes), 2 * codes.shape[1] // GROUP
        return self._kind(codes, torch.full(shape, self._scale, dtype=self._scale_dtype, device=self._device))
