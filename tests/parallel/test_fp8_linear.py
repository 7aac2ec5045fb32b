"""Linear layers with block-quantized weights: the product, its kernels, the module.

Kernels run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from dcpmla.attention.output import formats
from dcpmla.parallel.formats import Quantized, dequantize
from dcpmla.parallel.fp8 import dequantize_blocks, fp8_linear
from dcpmla.parallel.linear import Linear, RowParallelLinear, shard
from dcpmla.parallel.quantized import Fp8Product, QuantizedRows
from tests.support.hopper import compile_source
from tests.support.kernels import on_both, run_kernels
from tests.support.ranks import run_ranks

FP8 = torch.float8_e4m3fn
# A product of e4m3 by e4m3 has sums of float32 in each block, and is rounded once: less than bfloat16's own step.
TOLERANCE = 2**-8


def blocks(num_rows: int, width: int, seed: int = 0, device: str = "cpu") -> Quantized:
    """Make a random weight whose blocks' scales differ by up to 8."""
    generator = torch.Generator().manual_seed(seed)
    codes = (100 * torch.randn(num_rows, width, generator=generator)).clamp(-448, 448).to(FP8)
    exponents = 3 * torch.rand(-(-num_rows // 128), -(-width // 128), generator=generator)
    return Quantized(codes.to(device), (2.0**exponents / 100).to(device))


def rows(num_tokens: int, width: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Make random rows, one group of them of zeros and one of large numbers, cut out of wider ones."""
    x = torch.randn(num_tokens, width + 16, generator=torch.Generator().manual_seed(5))
    if num_tokens:
        x[0, :128], x[-1, -144:-16] = 0, 300 * x[-1, -144:-16]
    return x.to(device, dtype)[:, :width]


def quantized(x: Tensor, layout: str = "row") -> QuantizedRows:
    """Quantize on the CPU, as specified: a GPU's division by a number is a product with its inverse."""
    quant = formats.OutputQuant("fp8_groups", scale_layout=layout)
    values, scales = quant.empty(*x.shape, torch.device("cpu"))
    formats.write_fp8_groups(x.cpu(), 0, values, scales, False)
    on_device = torch.empty_strided(scales.shape, scales.stride(), device=x.device)
    return QuantizedRows(values.to(x.device), on_device.copy_(scales))


def exact(x: QuantizedRows, weight: Quantized, num_groups: int = 1) -> Tensor:
    """Multiply in float64."""
    values = (x.values.double().unflatten(1, (-1, 128)) * x.scales.double()[..., None]).flatten(1)
    parts = dequantize(weight, torch.float64).unflatten(0, (num_groups, -1))
    return torch.einsum("tgk,gnk->tgn", values.unflatten(1, (num_groups, -1)), parts).flatten(1)


def assert_near(got: Tensor, wanted: Tensor) -> None:
    assert (got.double() - wanted).norm() <= TOLERANCE * wanted.norm()


def check_kernel(device: str, dtype: torch.dtype, num_tokens: int, num_rows: int, width: int, groups: int = 1) -> None:
    """Compare rows that are quantized to the specified bytes and multiplied; a second time in another layout."""
    from dcpmla.parallel.kernels import linear, quantize

    weight, x = blocks(num_rows, width, device=device), rows(num_tokens, groups * width, dtype, device)
    wanted, got = quantized(x, "tma"), QuantizedRows(*quantize.quantize_rows(x))
    assert torch.equal(got[0].view(torch.uint8), wanted.values.view(torch.uint8))
    assert torch.equal(got[1], wanted.scales)
    assert got[1].stride() == wanted.scales.stride()
    arrivals = torch.zeros(-(-num_rows // 64) * 2, dtype=torch.int32, device=device)
    out = linear.multiply(*got, *weight[:2], arrivals, dtype)
    assert (out.dtype, out.shape) == (dtype, (num_tokens, num_rows))
    assert_near(out, exact(wanted, weight, groups))
    assert torch.equal(linear.multiply(*quantized(x), *weight[:2], arrivals, dtype), out)
    static = QuantizedRows(got.values, torch.tensor([0.3], device=device).expand(got.scales.shape))
    assert_near(linear.multiply(*static, *weight[:2], arrivals, dtype), exact(static, weight, groups))
    assert not arrivals.any()


def check_kernels(device: str) -> None:
    from dcpmla.parallel.kernels import quantize as kernels

    if device == "cuda":
        for num_tokens in (1, 8, 17, 33, 100, 300):
            for num_rows, width in ((2112, 7168), (6144, 1536), (200, 128), (576, 384)):
                check_kernel("cuda", torch.bfloat16, num_tokens, num_rows, width)
            check_kernel("cuda", torch.float32, num_tokens, 512, 640)
            check_kernel("cuda", torch.bfloat16, num_tokens, 2048, 4096, groups=2)
        return
    check_kernel("cpu", torch.float16, 3, 72, 14 * 128)  # in parts of the columns
    check_kernel("cpu", torch.float32, 17, 256, 128, groups=2)
    check_kernel("cpu", torch.bfloat16, 131, 72, 256)
    check_kernel("cpu", torch.bfloat16, 0, 72, 256)
    weight = Quantized(*map(torch.stack, zip(blocks(72, 200, 1)[:2], blocks(72, 200, 2)[:2], strict=True)))
    wanted = dequantize(weight, torch.bfloat16)
    assert torch.equal(kernels.dequantize(*weight[:2], torch.bfloat16), wanted)
    weight = Quantized(weight.codes[:, :, :128], weight.scales[:, :, :1])  # as heads' parts lie
    assert torch.equal(kernels.dequantize(*weight[:2], torch.bfloat16), wanted[..., :128])


@on_both
def test_kernels(device: str) -> None:
    run_kernels(device, check_kernels)


@pytest.mark.gpu
def test_the_operator_on_a_gpu() -> None:
    """Compare what cuBLAS multiplies, whatever the number of rows and of blocks, and what a graph replays."""
    from dcpmla.parallel.kernels.linear import SCALED_MM_TOKENS

    arrivals = torch.zeros(66, dtype=torch.int32, device="cuda")
    assert len(arrivals) >= 2112 // 32
    for num_rows, width in ((2112, 7168), (576, 384)):
        for num_tokens in (5, SCALED_MM_TOKENS + 4, SCALED_MM_TOKENS + 5, 1000):
            weight, x = blocks(num_rows, width, device="cuda"), rows(num_tokens, width, torch.bfloat16, "cuda")
            arguments, wanted = (*weight[:2], arrivals, torch.bfloat16), exact(quantized(x), weight)
            assert_near(fp8_linear(Fp8Product(x, None, *arguments)), wanted)
            for layout in ("row", "tma"):
                assert_near(fp8_linear(Fp8Product(*quantized(x, layout), *arguments)), wanted)
            static = QuantizedRows(
                quantized(x).values, torch.tensor([0.3], device="cuda").expand(num_tokens, width // 128)
            )
            assert_near(fp8_linear(Fp8Product(*static, *arguments)), exact(static, weight))
    graph, x = torch.cuda.CUDAGraph(), rows(8, 7168, torch.bfloat16, "cuda")
    weight = blocks(2112, 7168, device="cuda")
    wanted = fp8_linear(Fp8Product(x, None, *weight[:2], arrivals, torch.bfloat16))
    with torch.cuda.graph(graph):
        captured = fp8_linear(Fp8Product(x, None, *weight[:2], arrivals, torch.bfloat16))
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, wanted)
    assert torch.equal(dequantize_blocks(*weight[:2], torch.bfloat16), dequantize(weight, torch.bfloat16))


def compile_product(
    kernel: Any,
    tiles: dict[str, tuple[str, int]],
    num_tokens: int,
    others: dict[str, Any] | None = None,
    num_warps: int = 4,
    **pointers: str,
) -> str:
    """Compile a product by a weight of DeepSeek-V3's size; return its PTX.

    Args:
        tiles: Types of the rows that a descriptor loads, with the columns of a tile.
        others: More constants.
        num_warps: Warps of a program, of which `wgmma` takes 4.
    """
    from triton.compiler import ASTSource

    from dcpmla.parallel.kernels.linear import choose_tiling

    tokens, splits = choose_tiling(num_tokens, 2112, 7168)
    constants, names = {"SPLITS": splits, "STAGES": 4, **(others or {})}, kernel.arg_names
    types = {"out_ptr": "*bf16", "arrivals_ptr": "*i32", "partials_ptr": "*fp32"} | pointers
    sizes = {"x_desc": tokens, "weight_desc": 64}
    types |= {name: f"tensordesc<{dtype}[{sizes[name]}, {columns}]>" for name, (dtype, columns) in tiles.items()}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [(at,) for at, name in enumerate(names) if name.endswith(("_ptr", "columns"))]
    attributes = {at: [["tt.divisibility", 16]] for at in aligned}
    compiled = compile_source(ASTSource(kernel, signature, constants, attributes), {"num_warps": num_warps})
    product = rf"wgmma.mma_async.sync.aligned.m64n{tokens}k" if num_warps == 4 else "mma.sync.aligned.m16n8k16"
    assert re.search(product, compiled.asm["ptx"])
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 232_448
    return str(compiled.asm["ptx"])


@pytest.mark.parametrize("num_tokens", [1, 128])
def test_the_kernel_compiles_for_hopper(num_tokens: int) -> None:
    from dcpmla.parallel.kernels.linear import linear_kernel

    tiles = {"x_desc": ("fp8e4nv", 128), "weight_desc": ("fp8e4nv", 128)}
    scales = {"x_scales_ptr": "*fp32", "weight_scales_ptr": "*fp32"}
    assert "k32.f32.e4m3.e4m3" in compile_product(linear_kernel, tiles, num_tokens, **scales)


def test_the_operator() -> None:
    """On a CPU products are those of the dequantized weight; schemas and shapes are what tracing is told."""
    weight, x = blocks(200, 256), rows(3, 256, torch.float32)
    arrivals = torch.zeros(4, dtype=torch.int32)
    values = dequantize(weight, torch.float32)
    assert torch.equal(fp8_linear(Fp8Product(x, None, *weight[:2], arrivals, x.dtype)), F.linear(x, values))
    assert_near(fp8_linear(Fp8Product(*quantized(x), *weight[:2], arrivals, x.dtype)), exact(quantized(x), weight))
    two = rows(3, 512, torch.float64)
    wanted = torch.cat(
        [F.linear(part, values[at : at + 100].double()) for part, at in zip(two.split(256, 1), (0, 100), strict=True)],
        1,
    )
    torch.testing.assert_close(fp8_linear(Fp8Product(two, None, *weight[:2], arrivals, two.dtype)), wanted)
    checks = ("test_autograd_registration", "test_faketensor")  # a comparison of e4m3 is not implemented
    torch.library.opcheck(fp8_linear.op, (x, None, *weight[:2], arrivals, x.dtype, False), test_utils=checks)
    torch.library.opcheck(
        fp8_linear.op, (*quantized(x), *weight[:2], arrivals, torch.bfloat16, False), test_utils=checks
    )
    torch.library.opcheck(dequantize_blocks.op, (*weight[:2], torch.bfloat16), test_utils=checks)


def test_weights_stay_as_they_are_stored() -> None:
    """Blocks on one grid stay codes; mixed parts, others and widths that are no multiple of 128 become values."""
    parts = blocks(128, 256, 1), blocks(72, 256, 2)
    x = rows(5, 256, torch.bfloat16)
    for loaded, is_fp8 in (
        (parts, True),
        (parts[::-1], False),
        ((parts[0], dequantize(parts[1], torch.float32)), False),
    ):
        linear = Linear(256, 200, dtype=torch.bfloat16)
        linear.load(*loaded)
        values = torch.cat([dequantize(part, torch.bfloat16) for part in loaded])
        assert (linear.weight.dtype == FP8) == (linear.weight_scale is not None) == is_fp8
        assert linear.weight.element_size() * linear.weight.numel() == 200 * 256 * (1 if is_fp8 else 2)
        assert torch.equal(linear(x.view(5, 1, 256)), F.linear(x, values).view(5, 1, 200))
        assert torch.equal(linear.product(x, slice(128, 190)), F.linear(x, values)[:, 128:190])
        assert torch.equal(linear.product(x, slice(72, 190)), F.linear(x, values)[:, 72:190])
    narrow = Linear(200, 128, dtype=torch.bfloat16)
    narrow.load(blocks(128, 200))
    assert narrow.weight_scale is None
    assert torch.equal(narrow.weight, dequantize(blocks(128, 200), torch.bfloat16))
    with pytest.raises(ValueError, match="x is quantized, but the weight is not; pass rows in the weight's dtype"):
        narrow(quantized(x[:, :128]))


def check_ranks() -> None:
    """Compare sums and partial sums with their bias, of weights in fp8 and not."""
    group = dist.group.WORLD
    assert group is not None
    whole, x = blocks(72, 512), rows(3, 512, torch.float32)
    bias = torch.arange(72.0)
    part = slice(None), shard(512, group)
    for weight in (whole, dequantize(whole, torch.float32)):
        linear = RowParallelLinear(512, 72, True, group, dtype=torch.float32)
        columns = Quantized(weight.codes[part], weight.scales[:, shard(4, group)]) if weight is whole else weight[part]
        linear.load(columns)
        assert (linear.weight_scale is not None) == (weight is whole)
        assert linear.bias is not None
        linear.bias.data.copy_(bias)
        wanted = F.linear(x, dequantize(whole, torch.float32), bias)
        torch.testing.assert_close(linear(x[part]), wanted, rtol=1e-5, atol=1e-2)
        partial = linear.partial(x[part])
        dist.all_reduce(partial)
        torch.testing.assert_close(partial, wanted, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_row_parallel(num_ranks: int) -> None:
    run_ranks(num_ranks, check_ranks)
