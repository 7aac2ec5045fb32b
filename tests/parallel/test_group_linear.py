"""Linear layers with a scale per 32 columns: the product, its kernels, the module.

Kernels run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla.attention.layers.compressed.weights import GroupedLinear
from dcpmla.parallel.formats import Quantized, dequantize
from dcpmla.parallel.group_linear import group_linear
from dcpmla.parallel.linear import Linear
from dcpmla.parallel.reformat import reorder_rows
from tests.attention.test_decode_compile import compile_for_hopper
from tests.parallel.test_fp8_linear import assert_near, blocks, compile_product, rows
from tests.support.kernels import on_both, run_kernels
from tests.support.packed import KINDS, make_packed

FP8 = torch.float8_e4m3fn


def groups(num_rows: int, width: int, seed: int = 0, device: str = "cpu") -> Quantized:
    """Make a random weight whose scales differ by up to 2^6; one is 2^-127, of codes that are zero."""
    generator = torch.Generator().manual_seed(seed)
    codes = (100 * torch.randn(num_rows, width, generator=generator)).clamp(-448, 448).to(FP8)
    scales = torch.randint(118, 124, (num_rows, width // 32), generator=generator).to(torch.uint8)
    codes[0, :32], scales[0, 0] = 0, 0
    return Quantized(codes.to(device), scales.to(device))


def exact(weight: Quantized) -> Tensor:
    """Return the values, float64. A power of a GPU is rounded, even of a whole exponent."""
    factors = torch.ldexp(torch.ones_like(weight.scales, dtype=torch.float64), weight.scales.int() - 127)
    return weight.codes.double() * factors.repeat_interleave(32, 1)


def check_kernel(
    device: str, dtype: torch.dtype, num_tokens: int, num_rows: int, width: int, num_groups: int = 1
) -> None:
    """Compare both regimes with float64."""
    from dcpmla.parallel.kernels import group_linear as kernels

    weight = groups(num_rows, width, device=device)
    x = rows(num_tokens, num_groups * width, dtype, device)
    parts = x.double().unflatten(1, (num_groups, -1)), exact(weight).unflatten(0, (num_groups, -1))
    expected = torch.einsum("tgk,gnk->tgn", *parts).flatten(1)
    arrivals = torch.zeros(-(-num_rows // 64) * 2, dtype=torch.int32, device=device)
    for function in (kernels.multiply, kernels.group_linear):
        out = function(x, weight, arrivals)
        assert (out.dtype, out.shape) == (dtype, (num_tokens, num_rows))
        assert_near(out, expected)
    assert not arrivals.any()
    assert torch.equal(kernels.dequantize_groups(weight, torch.bfloat16).double(), exact(weight))


def check_packed(device: str, kind: str, dtype: torch.dtype, num_tokens: int, num_rows: int, width: int) -> None:
    """Compare both regimes with float64, over the same values in 16 bits."""
    from dcpmla.parallel.kernels import group_linear as kernels

    generator = torch.Generator().manual_seed(num_rows)
    weight = make_packed(kind, (num_rows,), width, generator).map(lambda part: part.to(device))
    x = rows(num_tokens, width, dtype, device)
    # Integers and their scales are rounded to 16 bits; the factors of e2m1 multiply sums.
    of_integers = torch.float16 if dtype == torch.float16 else torch.bfloat16
    exact_dtype = torch.float64 if kind.endswith("fp4") else of_integers
    values = dequantize(weight, exact_dtype).double()
    arrivals = torch.zeros(-(-num_rows // 64) * 2, dtype=torch.int32, device=device)
    for function in (kernels.multiply, kernels.group_linear):
        out = function(x, weight, arrivals)
        assert (out.dtype, out.shape) == (dtype, (num_tokens, num_rows))
        expected = x.double() @ values.T
        tolerance = 8e-4 if dtype == torch.float16 and device == "cuda" else 5e-3  # the interpreter sums in float16
        assert (out.double() - expected).norm() <= tolerance * expected.norm()
    assert not arrivals.any()
    got = kernels.dequantize_groups(weight, of_integers).double()
    assert (got - values).norm() <= 4e-3 * values.norm()


def check_packed_kernels(device: str) -> None:
    for kind in KINDS:
        if device == "cuda":
            for num_tokens in (1, 8, 17, 33, 64, 100, 128, 300):
                for num_rows, width in ((2112, 7168), (7168, 2048), (200, 128)):
                    check_packed("cuda", kind, torch.bfloat16, num_tokens, num_rows, width)
                check_packed("cuda", kind, torch.float16, num_tokens, 2112, 7168)
        for num_tokens, num_rows, width in ((3, 72, 14 * 128), (17, 40, 384), (131, 72, 256)) * (device == "cpu"):
            check_packed("cpu", kind, torch.float32, num_tokens, num_rows, width)
        if device == "cpu":
            check_packed("cpu", kind, torch.float16, 17, 40, 384)
    check_packed(device, "int4", torch.float32 if device == "cpu" else torch.bfloat16, 3, 72, 160)  # a part of a tile


@on_both
def test_packed_kernels(device: str) -> None:
    run_kernels(device, check_packed_kernels)


def check_kernels(device: str) -> None:
    if device == "cuda":
        for num_tokens in (1, 8, 17, 33, 64, 100, 128, 300):
            for num_rows, width in ((2112, 7168), (20480, 6144), (200, 128), (576, 384)):
                check_kernel("cuda", torch.bfloat16, num_tokens, num_rows, width)
            check_kernel("cuda", torch.bfloat16, num_tokens, 2048, 4096, num_groups=2)
            check_kernel("cuda", torch.float16, num_tokens, 2112, 7168)
        return
    # The interpreter multiplies no bfloat16.
    check_kernel("cpu", torch.float32, 3, 72, 14 * 128)  # in parts of the columns
    check_kernel("cpu", torch.float32, 17, 256, 128, num_groups=2)
    check_kernel("cpu", torch.float32, 131, 72, 256)
    check_kernel("cpu", torch.float32, 131, 256, 128, num_groups=2)
    check_kernel("cpu", torch.float32, 0, 72, 256)


@on_both
def test_kernels(device: str) -> None:
    run_kernels(device, check_kernels)


@pytest.mark.parametrize("num_tokens", [1, 128])
def test_the_kernel_compiles_for_hopper(num_tokens: int) -> None:
    from dcpmla.parallel.kernels.group_linear import group_linear_kernel

    others = {"GROUP": 32, "weight_zeros_ptr": None, "weight_factors_ptr": None}
    for dtype, kind in (("bf16", "bf16"), ("fp16", "f16")):
        tiles = {"x_desc": (dtype, 128), "weight_desc": ("fp8e4nv", 128)}
        pointers = {"weight_scales_ptr": "*u8", "out_ptr": f"*{dtype}"}
        ptx = compile_product(group_linear_kernel, tiles, num_tokens, others, 4, **pointers)
        assert f"k16.f32.{kind}.{kind}" in ptx


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("scales", "group", "zeros"),
    [("u8", 32, False), ("fp8e4nv", 16, False), ("bf16", 128, False), ("fp16", 128, True)],
)
def test_packed_products_compile_for_hopper(scales: str, group: int, zeros: bool, dtype: str) -> None:
    from dcpmla.parallel.kernels.group_linear import _TILINGS, group_linear_kernel

    for num_tokens, columns, tiling in ((1, 128, _TILINGS[0]), (128, 64, _TILINGS[-1])):
        pointers = {"weight_scales_ptr": f"*{scales}", "weight_zeros_ptr": "*u8", "weight_factors_ptr": "*fp32"}
        others: dict[str, Any] = {"GROUP": group}
        others |= {} if zeros else {"weight_zeros_ptr": None}
        others |= {} if scales == "fp8e4nv" else {"weight_factors_ptr": None}
        tiles = {"x_desc": (dtype, columns), "weight_desc": ("u8", 64)}
        kind = "bf16" if dtype == "bf16" else "f16"
        pointers["out_ptr"] = f"*{dtype}"
        ptx = compile_product(group_linear_kernel, tiles, num_tokens, others, tiling.num_warps, **pointers)
        assert f".f32.{kind}.{kind}" in ptx
        # With few tokens, scales of groups of 128 multiply sums instead of integers.
        assert ("mul.rn." in ptx) == (group < 128 or num_tokens > 32)


def test_the_operator() -> None:
    weight, x = groups(200, 256), rows(3, 256, torch.float64)
    arrivals = torch.zeros(4, dtype=torch.int32)
    torch.testing.assert_close(group_linear(x, weight, arrivals), x @ exact(weight).T)
    two = rows(3, 512, torch.float64)
    halves = zip(two.split(256, 1), exact(weight).split(100), strict=True)
    expected = torch.cat([x @ part.T for x, part in halves], 1)
    torch.testing.assert_close(group_linear(two, weight, arrivals), expected)
    checks = ("test_autograd_registration", "test_faketensor")  # a comparison of e4m3 is not implemented
    torch.library.opcheck(group_linear.op, group_linear.flatten(x, weight, arrivals), test_utils=checks)


def test_weights_stay_as_they_are_stored() -> None:
    """Keep codes of groups of any rows; mixed with blocks or values, and in odd widths, they become values."""
    parts = groups(72, 256, 1), groups(128, 256, 2)
    block = Quantized(torch.ones(72, 256).to(FP8), torch.ones(1, 2))
    x = rows(5, 256, torch.bfloat16)
    for loaded, is_fp8 in ((parts, True), ((block, parts[1]), False), ((exact(parts[0]).float(), parts[1]), False)):
        linear = Linear(256, 200, dtype=torch.bfloat16)
        linear.load(*loaded)
        values = torch.cat([dequantize(part, torch.bfloat16) for part in loaded])
        assert (linear.weight.dtype == FP8) == (linear.weight_scale is not None) == is_fp8
        assert not linear.takes_quantized
        assert torch.equal(linear(x.view(5, 1, 256)), F.linear(x, values).view(5, 1, 200))
        assert torch.equal(linear.product(x, slice(71, 190)), F.linear(x, values[71:190]))
    narrow = Linear(160, 72, dtype=torch.bfloat16)
    narrow.load(groups(72, 160))
    assert narrow.weight_scale is None


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_stay_as_they_are_stored(kind: str) -> None:
    """Parts in one format are stacked; beside another format they become values."""
    generator = torch.Generator().manual_seed(1)
    first, second = (make_packed(kind, (num_rows,), 256, generator) for num_rows in (72, 128))
    x = rows(5, 256, torch.float32)
    for parts, is_packed in (((first, second), True), ((first, dequantize(second, torch.float32)), False)):
        linear = Linear(256, 200, dtype=torch.float32)
        linear.load(*parts)
        values = torch.cat([dequantize(part, torch.float32) for part in parts])
        assert (linear.weight.dtype == torch.uint8) == (linear.weight_scale is not None) == is_packed
        torch.testing.assert_close(linear(x.view(5, 1, 256)), F.linear(x, values).view(5, 1, 200))
        torch.testing.assert_close(linear.product(x, slice(71, 190)), F.linear(x, values[71:190]))


def test_rows_in_another_order() -> None:
    order, weight = torch.arange(24).roll(5), groups(72, 64)
    moved = reorder_rows(weight, order)
    assert isinstance(moved, Quantized)
    assert torch.equal(exact(moved), exact(weight).unflatten(0, (3, 24))[:, order].flatten(0, 1))


@pytest.mark.parametrize("make", [blocks, groups])
def test_groups_of_columns(make: Callable[[int, int], Quantized]) -> None:
    """Each group has its rows of the weight, which becomes values unless their number is a multiple of 128."""
    for out_features, is_fp8 in ((256, True), (200, False)):
        weight, x = make(out_features, 256), rows(5, 512, torch.bfloat16)
        linear = GroupedLinear(2, 256, out_features, dtype=torch.bfloat16)
        linear.load(weight)
        assert (linear.weight_scale is not None) == is_fp8
        halves = zip(x.chunk(2, 1), dequantize(weight, torch.bfloat16).chunk(2), strict=True)
        torch.testing.assert_close(linear(x), torch.cat([F.linear(*half) for half in halves], 1))


def test_dequantizing_compiles_for_hopper() -> None:
    from triton.compiler import ASTSource

    from dcpmla.parallel.kernels.group_linear import dequantize_groups_kernel

    for codes, group in (("fp8e4nv", 32), ("u8", 128)):
        types = {"codes_ptr": f"*{codes}", "scales_ptr": "*u8", "out_ptr": "*bf16"}
        constants = {"GROUPS": 64, "GROUP": group, "zeros_ptr": None, "factors_ptr": None}
        ptx, log = compile_for_hopper(dequantize_groups_kernel, ASTSource, types, constants, num_warps=4)
        assert "st.global.v4" in ptx  # 8 values at a time
        assert "st.shared" not in ptx  # no value moves between threads
        assert "0 bytes spill stores" in log
