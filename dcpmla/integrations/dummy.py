"""Random weights in the shapes and formats of a checkpoint, made where they are needed: for measuring without one."""

import hashlib
import re
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from dcpmla.hf_quantization import has_mxfp8, stored_as
from dcpmla.integrations.model_size import held_as
from dcpmla.parallel.formats import AnyWeight, Format, Quantized
from dcpmla.parallel.linear import Weight

_STD = 0.02  # standard deviation of weights, as in initialized models
_SCALES = {  # of all groups, by their codes
    "fp8": _STD,
    "mxfp8": 121,  # e8m0 of 2^-6
    "fp4": 120,  # e8m0 of 2^-7: e2m1's values are within 6 x 2^-7
    "nvfp4": 2.0**-7,
    "int4": _STD / 5,  # integers from -8 to 7
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
    has_groups = has_mxfp8(getattr(config, "quantization_config", None) or {})

    def new(name: str, shape: tuple[int, ...]) -> Weight:
        if name.endswith(".tid2eid"):
            return _routes(shape, shapes[name.removesuffix("tid2eid") + "weight"][0], device)
        may_be = _ROUTED.search(name) or (_QUANTIZED.search(name) and not _NOT_QUANTIZED.search(name))
        scheme = stored_as(config, name.removesuffix(".weight")) if len(shape) == 2 and may_be else None
        held = None if scheme is None else held_as(scheme, shape, has_groups)
        args = name, shape, dtype, device
        return _DummyWeight(*args) if held is None else _DummyQuantized(held, *args)

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


class _DummyQuantized(_DummyWeight):
    """A matrix in 8 or 4 bits."""

    def __init__(self, held: Format, *args: Any) -> None:
        super().__init__(*args)
        self._held = held

    def stored(self, rows: slice, cols: slice) -> AnyWeight:
        held, shape = self._held, (len(range(*rows.indices(self.shape[0]))), len(range(*cols.indices(self.shape[1]))))
        if held.is_packed:
            cut = held.cut_at(*cols.indices(self.shape[1])[:2])
            held, is_whole = cut or held, cut is not None
        else:
            sides = zip((rows, cols), (held.rows, held.columns), self.shape, strict=True)
            bounds = ((*part.indices(size)[:2], side, size) for part, side, size in sides)
            is_whole = all(not first % side and (not end % side or end == size) for first, end, side, size in bounds)
        if not is_whole:
            return self[rows, cols]
        codes = self._draw((rows, cols))
        # Two codes a byte; any bits are codes.
        codes = (
            codes[:, ::2].contiguous().view(torch.uint8)[:, ::2].contiguous()
            if held.is_packed
            else codes.to(torch.float8_e4m3fn)
        )
        groups = -(-shape[0] // held.rows), -(-shape[1] // held.columns)
        scales = torch.full(groups, _SCALES[held.codes], device=self._device).to(held.scales)
        zeros = torch.full(groups, 8, dtype=torch.uint8, device=self._device) if held.has_zeros else None
        factors = torch.ones(shape[0], device=self._device) if held.has_factors else None
        return Quantized(codes, scales, zeros, factors)
