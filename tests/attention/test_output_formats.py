"""Quantized outputs byte by byte: plain torch against numpy and the formulas."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from dcpmla.attention.output import ops as output_ops
from dcpmla.attention.output.formats import OutputQuant
from dcpmla.cache.formats import FP8
from tests.support.kernels import randn

GRID = (0, 0.5, 1, 1.5, 2, 3, 4, 6)  # of e2m1
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0)  # between its numbers, and what lies beside them
TIES += (0.2, 0.26, 0.74, 0.76, 6, 4.9, 5.1, 6)
KINDS = (
    OutputQuant("fp8", scale=torch.tensor([0.013])),
    *(
        OutputQuant("fp8_groups", group_size=size, scale_layout=layout, ue8m0=ue8m0)
        for size, layout, ue8m0 in ((128, "row", False), (64, "column", True), (64, "tma", False), (128, "tma", True))
    ),
    OutputQuant("nvfp4", scale=torch.tensor(256.0)),
)


def codes(x: Tensor) -> Tensor:
    """Bytes in the order of the indices."""
    return (x if x.dtype == torch.float32 else x.view(torch.uint8)).cpu()


def e4m3(x: np.ndarray) -> np.ndarray:
    """Bytes of e4m3, rounded to nearest, ties to even: by search among all its numbers, in float64."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    numbers = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    size = np.minimum(np.abs(x.astype(np.float64)), 448)
    above = np.searchsorted(numbers, size).clip(1)
    low, high = size - numbers[above - 1], numbers[above] - size
    nearest = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return (nearest | np.signbit(x) << 7).astype(np.uint8)


def test_fp8_byte_for_byte() -> None:
    """Also next to ties, where a division by the scale rounds another way than the product with its inverse."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    odd = torch.tensor([0.0, -0.0, 1e30, -1e30, 464, 465, 2**-10])
    x = torch.cat([randn(3000) * 10 ** randn(3000, seed=1), odd, ties * 0.013])[None]
    for scale in (1.0, 0.013, 700.0):
        inverse = np.float32(1) / np.float32(scale)
        values, _ = output_ops.quantize_output(x, OutputQuant("fp8", torch.tensor([scale])))
        assert np.array_equal(codes(values).numpy(), e4m3(x.numpy() * inverse))
        assert (scale != 0.013) == np.array_equal(codes(values).numpy(), e4m3(x.numpy() / np.float32(scale)))
        half = output_ops.quantize_output(x.bfloat16(), OutputQuant("fp8", torch.tensor(scale)))[0]
        assert np.array_equal(codes(half).numpy(), e4m3(x.bfloat16().float().numpy() * inverse))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 128])
def test_groups_byte_for_byte(size: int, dtype: torch.dtype) -> None:
    rows = (randn(5, 384) * 10 ** (3 * randn(5, 384 // size, seed=1)).repeat_interleave(size, 1)).to(dtype)
    rows[1], rows[2, :size], rows[3, ::size] = 0, 1e-12, 448 * 2.0**9
    x = rows.float()
    groups = x.numpy().reshape(5, -1, size)
    s = np.maximum(np.abs(groups).max(-1), np.float32(1e-10)) / np.float32(448)
    for ue8m0, layout in itertools.product((False, True), ("row", "column", "tma")):
        powers = [[next(2.0**e for e in range(-60, 60) if 2.0**e >= one) for one in row] for row in s]
        scales = np.array(powers) if ue8m0 else s
        values, got = output_ops.quantize_output(rows, OutputQuant("fp8_groups", None, size, layout, ue8m0))
        assert np.array_equal(got.numpy(), scales)
        assert np.array_equal(codes(values).numpy(), e4m3(groups / scales[..., None].astype(np.float32)).reshape(5, -1))
        assert got.stride() == {"row": (384 // size, 1), "column": (1, 5), "tma": (1, 8)}[layout]


def test_ue8m0_is_exact_at_powers_of_two_and_beside_them() -> None:
    """A float32 log2 takes the neighbours of 2^k for 2^k."""
    powers = 2.0 ** torch.arange(-30, 60)
    below, above = (torch.nextafter(448 * powers, torch.tensor(bound)) for bound in (0.0, torch.inf))
    amax = torch.stack([below, 448 * powers, above])
    x = torch.zeros(3 * len(powers), 64)
    x[:, 5] = -amax.flatten()
    _, scales = output_ops.quantize_output(x, OutputQuant("fp8_groups", None, 64, "row", True))
    s = amax / 448  # beside a power of two a division may round to it
    assert torch.equal(scales.view(3, -1), torch.where(s > powers, 2 * powers, powers))
    assert (s[2] > powers).any()


def unswizzle(scales: Tensor) -> np.ndarray:
    """[rows, columns] of a tile order of 128 x 4, by the formula of a byte's address."""
    rows, columns = scales.shape
    flat = scales.view(torch.uint8).flatten().numpy()
    m, k = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    return flat[(m // 128 * (columns // 4) + k // 4) * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4]


@pytest.mark.parametrize(("rows", "columns"), [(5, 80), (130, 64), (128, 128), (0, 64)])
def test_nvfp4_byte_for_byte(rows: int, columns: int) -> None:
    x, g = randn(rows, columns) * 10 ** randn(rows, 1, seed=1), np.float32(37.5)
    if rows:
        x[1], x[2, :16], x[3, :16] = 0, 1e-6, 1e4  # scales of 0, of less than e4m3 holds, of more
        ties = torch.tensor(TIES)
        x[4, :32] = torch.cat([ties, -ties]) / g
    values, scales = output_ops.quantize_output(x, OutputQuant("nvfp4", torch.tensor([g])))
    groups = x.numpy().reshape(rows, columns // 16, 16)
    s = e4m3(g * np.abs(groups).max(-1, initial=0) / np.float32(6))
    wide = torch.from_numpy(s).view(FP8).float().numpy()
    factor = np.divide(g, wide, out=np.zeros_like(wide), where=wide != 0)
    scaled = (groups * factor[..., None]).reshape(rows, columns)
    distance = np.abs(np.abs(scaled).clip(max=6)[..., None].astype(np.float64) - np.array(GRID))
    code = (distance - 1e-9 * (np.arange(8) % 2 == 0)).argmin(-1) | np.signbit(scaled) << 3  # ties to the even code
    assert np.array_equal(values.numpy(), code[:, ::2] | code[:, 1::2] << 4)
    plain = np.zeros(scales.shape, np.uint8)
    plain[:rows, : columns // 16] = s
    assert scales.shape == (-(-rows // 128) * 128, -(-columns // 64) * 4)
    assert np.array_equal(unswizzle(scales), plain)
