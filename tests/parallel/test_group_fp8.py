"""Linear layers with a scale per 32 columns: the product, its kernels, the module.

Kernels run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla.attention.layers.compressed.weights import GroupedLinear
from dcpmla.parallel.group_fp8 import group_fp8_linear
from dcpmla.parallel.linear import Linear
from dcpmla.parallel.quantized import BlockFp8, GroupFp8, dequantize
from dcpmla.parallel.reformat import reorder_rows
from tests.attention.test_decode_compile import compile_for_hopper
from tests.support.hopper import compile_source
from tests.support.shared_memory import run_interpreted

FP8 = torch.float8_e4m3fn
TOLERANCE = 2**-8  # sums in float32 are rounded once to bfloat16


def groups(num_rows: int, width: int, seed: int = 0, device: str = "cpu") -> GroupFp8:
    """Make a random weight whose scales differ by up to 2^6; one is 2^-127, of codes that are zero."""
    generator = torch.Generator().manual_seed(seed)
    codes = (100 * torch.randn(num_rows, width, generator=generator)).clamp(-448, 448).to(FP8)
    scales = torch.randint(118, 124, (num_rows, width // 32), generator=generator).to(torch.uint8)
    codes[0, :32], scales[0, 0] = 0, 0
    return GroupFp8(codes.to(device), scales.to(device))


def exact(weight: GroupFp8) -> Tensor:
    """Return the values, float64. A power of a GPU is rounded, even of a whole exponent."""
    factors = torch.ldexp(torch.ones_like(weight.scales, dtype=torch.float64), weight.scales.int() - 127)
    return weight.codes.double() * factors.repeat_interleave(32, 1)


def rows(num_tokens: int, width: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Make random rows, cut out of wider ones."""
    x = torch.randn(num_tokens, width + 16, generator=torch.Generator().manual_seed(5))
    return x.to(device, dtype)[:, :width]


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert (got.double() - expected).norm() <= TOLERANCE * expected.norm()


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
    for function in (kernels.multiply, kernels.group_fp8_linear):
        out = function(x, *weight, arrivals)
        assert (out.dtype, out.shape) == (dtype, (num_tokens, num_rows))
        assert_near(out, expected)
    assert not arrivals.any()
    assert torch.equal(kernels.dequantize_groups(*weight, torch.bfloat16).double(), exact(weight))


def check_in_the_interpreter() -> None:
    from tests.support.interpreter import convert_as_torch

    convert_as_torch()  # it multiplies no bfloat16
    check_kernel("cpu", torch.float32, 3, 72, 14 * 128)  # in parts of the columns
    check_kernel("cpu", torch.float32, 17, 256, 128, num_groups=2)
    check_kernel("cpu", torch.float32, 131, 72, 256)
    check_kernel("cpu", torch.float32, 131, 256, 128, num_groups=2)
    check_kernel("cpu", torch.float32, 0, 72, 256)


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted(1, check_in_the_interpreter)


@pytest.mark.gpu
def test_kernels() -> None:
    for num_tokens in (1, 8, 17, 33, 100, 300):
        for num_rows, width in ((2112, 7168), (20480, 6144), (200, 128), (576, 384)):
            check_kernel("cuda", torch.bfloat16, num_tokens, num_rows, width)
        check_kernel("cuda", torch.bfloat16, num_tokens, 2048, 4096, num_groups=2)


@pytest.mark.parametrize("num_tokens", [1, 128])
def test_the_kernel_compiles_for_hopper(num_tokens: int) -> None:
    pytest.importorskip("triton")
    from triton.compiler import ASTSource

    from dcpmla.parallel.kernels.group_linear import group_linear_kernel
    from dcpmla.parallel.kernels.linear import choose_tiling

    tiling = choose_tiling(num_tokens, 2112, 7168)
    constants, names = {"SPLITS": tiling.splits, "STAGES": 4}, group_linear_kernel.arg_names
    types = {
        "x_desc": f"tensordesc<bf16[{tiling.tokens}, 128]>",
        "weight_desc": "tensordesc<fp8e4nv[64, 128]>",
        "weight_scales_ptr": "*u8",
        "out_ptr": "*bf16",
        "partials_ptr": "*fp32",
        "arrivals_ptr": "*i32",
    }
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [(at,) for at, name in enumerate(names) if name.endswith(("_ptr", "columns"))]
    attributes = {at: [["tt.divisibility", 16]] for at in aligned}
    source = ASTSource(group_linear_kernel, signature, constexprs=constants, attrs=attributes)
    compiled = compile_source(source, {"num_warps": 4})
    assert re.search(rf"wgmma.mma_async.sync.aligned.m64n{tiling.tokens}k16.f32.bf16.bf16", compiled.asm["ptx"])
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 232_448


def test_the_operator() -> None:
    weight, x = groups(200, 256), rows(3, 256, torch.float64)
    arrivals = torch.zeros(4, dtype=torch.int32)
    torch.testing.assert_close(group_fp8_linear(x, *weight, arrivals), x @ exact(weight).T)
    two = rows(3, 512, torch.float64)
    halves = zip(two.split(256, 1), exact(weight).split(100), strict=True)
    expected = torch.cat([x @ part.T for x, part in halves], 1)
    torch.testing.assert_close(group_fp8_linear(two, *weight, arrivals), expected)
    checks = ("test_autograd_registration", "test_faketensor")  # a comparison of e4m3 is not implemented
    torch.library.opcheck(group_fp8_linear.op, (x, *weight, arrivals), test_utils=checks)


def test_weights_stay_as_they_are_stored() -> None:
    """Keep codes of groups of any rows; mixed with blocks or values, and in odd widths, they become values."""
    parts = groups(72, 256, 1), groups(128, 256, 2)
    block = BlockFp8(torch.ones(72, 256).to(FP8), torch.ones(1, 2))
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


def test_rows_in_another_order() -> None:
    order, weight = torch.arange(24).roll(5), groups(72, 64)
    moved = reorder_rows(weight, order)
    assert isinstance(moved, GroupFp8)
    assert torch.equal(exact(moved), exact(weight).unflatten(0, (3, 24))[:, order].flatten(0, 1))


def test_groups_of_columns() -> None:
    """Each group has its rows of the weight; kernels take groups of a multiple of 128 rows."""
    for out_features, is_fp8 in ((256, True), (200, False)):
        weight, x = groups(out_features, 256), rows(5, 512, torch.bfloat16)
        linear = GroupedLinear(2, 256, out_features, dtype=torch.bfloat16)
        linear.load(weight)
        assert (linear.weight_scale is not None) == is_fp8
        halves = zip(x.chunk(2, 1), dequantize(weight, torch.bfloat16).chunk(2), strict=True)
        torch.testing.assert_close(linear(x), torch.cat([F.linear(*half) for half in halves], 1))


def test_dequantizing_compiles_for_hopper() -> None:
    pytest.importorskip("triton")
    from triton.compiler import ASTSource

    from dcpmla.parallel.kernels.group_linear import dequantize_groups_kernel

    types = {"codes_ptr": "*fp8e4nv", "scales_ptr": "*u8", "out_ptr": "*bf16"}
    ptx, log = compile_for_hopper(dequantize_groups_kernel, ASTSource, types, {"GROUPS": 64}, num_warps=4)
    assert "ld.global.v4" in ptx  # 16 codes at a time
    assert "0 bytes spill stores" in log
