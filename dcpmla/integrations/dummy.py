"""Random weights in the shapes and formats of a checkpoint, made where they are needed: for measuring without one."""

import hashlib
import re
from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from dcpmla.parallel.linear import Weight
from dcpmla.parallel.quantized import BLOCK, GROUP, BlockFp8, GroupFp4, GroupInt4, dequantize

_STD = 0.02  # standard deviation of weights, as in initialized models
_FP4_SCALE = 120  # e8m0 of 2^-7: e2m1's values are within 6 x 2^-7
_INT4_SCALE = _STD / 5  # integers from -8 to 7
# Linear layers that are published in block fp8, in models that have any.
_QUANTIZED = re.compile(r"\.layers\..*(_proj(_with_mqa)?|\.w[qko](_[ab])?)\.weight$")
_ROUTED = re.compile(r"\.experts\.\d+\.")
_NOT_QUANTIZED = re.compile(r"\.(weights_proj|compressor|eh_proj)\b")


def dummy_weights(
    shapes: Mapping[str, tuple[int, ...]],
    is_fp8: bool,
    expert_codes: str | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Mapping[str, Weight]:
    """Return weights by their names: matrices around 0, norms of 1, biases of 0. A slice is the same on all ranks.

    Args:
        is_fp8: Whether linear layers are e4m3 with a scale per block, as DeepSeek-V3's are published.
        expert_codes: Format of routed experts: "fp4", e2m1 with a scale per group, as in DeepSeek-V4; "int4", as in
            Kimi-K2-Thinking; anything else: the format of other linear layers.
    """

    def new(name: str, shape: tuple[int, ...]) -> Weight:
        if name.endswith(".tid2eid"):
            return _routes(shape, shapes[name.removesuffix("tid2eid") + "weight"][0], device)
        if expert_codes in _IN_4_BITS and _ROUTED.search(name):
            return _IN_4_BITS[expert_codes](name, shape, dtype, device)
        if is_fp8 and len(shape) == 2 and _QUANTIZED.search(name) and not _NOT_QUANTIZED.search(name):
            return _DummyFp8(name, shape, dtype, device)
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
            fill = torch.ones if "norm" in self._name and self._name.endswith("weight") else torch.zeros
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

    def stored(self, rows: slice, cols: slice) -> Tensor | BlockFp8:
        codes = self._draw((rows, cols)).to(torch.float8_e4m3fn)
        scales = torch.full([-(-size // BLOCK) for size in codes.shape], _STD, device=self._device)
        weight = BlockFp8(codes, scales)
        bounds = [(*part.indices(size)[:2], size) for part, size in zip((rows, cols), self.shape, strict=True)]
        is_on_grid = all(start % BLOCK == 0 and (end % BLOCK == 0 or end == size) for start, end, size in bounds)
        return weight if is_on_grid else dequantize(weight, self._dtype)


class _DummyFp4(_DummyWeight):
    """A matrix in e2m1, its columns cut between groups."""

    def stored(self, rows: slice, cols: slice) -> GroupFp4:
        codes = self._draw_codes(rows, cols)
        return GroupFp4(codes, self._equal_scales(codes, _FP4_SCALE, torch.uint8))

    def _draw_codes(self, rows: slice, cols: slice) -> Tensor:
        """Return two codes a byte; any bits are codes."""
        return self._draw((rows, cols))[:, ::2].contiguous().view(torch.uint8)[:, ::2].contiguous()

    def _equal_scales(self, codes: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        return torch.full((len(codes), 2 * codes.shape[1] // GROUP), scale, dtype=dtype, device=self._device)


class _DummyInt4(_DummyFp4):
    """A matrix of integers in 4 bits, its columns cut between groups."""

    def stored(self, rows: slice, cols: slice) -> GroupInt4:  # type: ignore[override]
        codes = self._draw_codes(rows, cols)
        return GroupInt4(codes, self._equal_scales(codes, _INT4_SCALE, torch.bfloat16))


_IN_4_BITS: dict[str | None, type[_DummyWeight]] = {"fp4": _DummyFp4, "int4": _DummyInt4}
