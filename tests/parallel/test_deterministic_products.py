"""Products in a fixed order: a row has the same bits alone, in any batch and place, next to any other rows.

Without a GPU the kernels run in Triton's interpreter, whose products round with the shapes of tiles: there they are
compared with float64, and on GPUs with themselves, tile by tile.
"""

import itertools
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from dcpmla.attention.output.formats import OutputQuant
from dcpmla.attention.output.rows import OutputRows
from dcpmla.attention.projection_calls import QueryAbsorption, ValueProjection
from dcpmla.attention.projections import absorb_query, project_values
from dcpmla.parallel.by_rows import by_rows
from dcpmla.parallel.fixed import fixed_linear, multiply_rows
from dcpmla.parallel.formats import Quantized
from dcpmla.parallel.fp8 import fp8_linear, quantize_rows
from dcpmla.parallel.linear import Linear, RowParallelLinear, shard
from dcpmla.parallel.quantized import Fp8Product
from dcpmla.runtime.graph_sizes import warm_up_sizes
from tests.parallel.test_fp8_linear import blocks, exact, quantized
from tests.support.kernels import run_kernels
from tests.support.ranks import run_ranks
from tests.support.row_errors import largest_error
from tests.support.rows_apart import assert_rows_apart, rows_differ

FP8 = torch.float8_e4m3fn


def drawn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rows_on_a_cpu(dtype: torch.dtype) -> None:
    for num_rows, width in ((8, 24), (130, 512), (40, 96)):
        x, weight = drawn(300, width, dtype=dtype), drawn(num_rows, width, dtype=dtype, seed=1)
        out = assert_rows_apart(lambda x: fixed_linear(x, weight, x.dtype), x)  # noqa: B023
        torch.testing.assert_close(out, F.linear(x, weight), atol=width**0.5 * 4 * torch.finfo(dtype).eps, rtol=1e-2)
        # A rank that holds more heads computes the same numbers.
        assert torch.equal(fixed_linear(x[:9], weight[3 : num_rows - 2], dtype), out[:9, 3 : num_rows - 2])
    heads = drawn(3, 40, 24, dtype=dtype, seed=2)
    out = assert_rows_apart(lambda x: multiply_rows(x, heads), drawn(70, 3, 24, dtype=dtype))
    assert torch.equal(out[:, 1:2], multiply_rows(drawn(70, 3, 24, dtype=dtype)[:, 1:2], heads[1:2]))
    assert fixed_linear(x.new_empty(0, width), weight, dtype).shape == (0, num_rows)
    three = fixed_linear(x[:6].view(2, 3, -1), weight, dtype)
    assert torch.equal(three.flatten(0, 1), fixed_linear(x[:6], weight, dtype))


def test_that_the_check_finds_other_orders() -> None:
    """Whole batches by one product of torch, and a sum whose parts depend on the number of rows."""
    x, weight = drawn(300, 512), drawn(64, 512, seed=1)

    def split(x: Tensor) -> Tensor:
        parts = zip(*(part.chunk(2 if len(x) > 8 else 1, -1) for part in (x, weight)), strict=True)
        return sum((multiply_rows(*part) for part in parts), torch.zeros(1))

    for product in (lambda x: F.linear(x, weight), split):
        assert rows_differ(product, x)
        with pytest.raises(AssertionError, match="row 0 differs"):
            assert_rows_apart(product, x)


def test_functions_by_rows() -> None:
    """torch's own exponential differs at the ends of a tensor."""
    x = drawn(70, 9)
    for function in (torch.sigmoid, torch.tanh, torch.exp):
        assert_rows_apart(lambda x: by_rows(function, x), x)  # noqa: B023
    whole, part = by_rows(lambda x, y: (x + 1, y), x, x[:, :2])
    assert torch.equal(whole, x + 1)
    assert torch.equal(part, x[:, :2])
    assert by_rows(torch.exp, x[:0]).shape == (0, 9)


def layers(device: str, dtype: torch.dtype) -> list[tuple[Linear, Callable[[Tensor], object]]]:
    """Return a layer of each kind of weight, and the forms in which it takes rows."""
    pairs = []
    for weight, has_bias in ((drawn(200, 256), True), (blocks(200, 256), False)):
        linear = Linear(256, 200, has_bias, device, dtype)
        linear.load(weight.map(lambda part: part.to(device)) if isinstance(weight, Quantized) else weight.to(device))
        if linear.bias is not None:
            linear.bias.data.copy_(torch.arange(200.0))
        linear.is_deterministic = True
        pairs.append((linear, lambda x: x))
        if linear.takes_quantized:
            pairs.append((linear, quantize_rows))
    return pairs


def check_layers(device: str, dtype: torch.dtype) -> None:
    for linear, form in layers(device, dtype):
        x = drawn(300, 256, dtype=dtype, device=device)
        out = assert_rows_apart(lambda x: linear(form(x)), x)  # noqa: B023
        part = assert_rows_apart(lambda x: linear.product(form(x), slice(128, 190)), x)  # noqa: B023
        if linear.bias is None:
            assert torch.equal(out[:, 128:190], part)
        linear.is_deterministic = False
        torch.testing.assert_close(out, linear(form(x)), atol=0.2, rtol=2**-6)


def test_layers_on_a_cpu() -> None:
    check_layers("cpu", torch.float32)


def assert_rows_near(out: Tensor, expected: Tensor) -> None:
    """Bound the error of each head's row by the row's norm.

    The kernels round weights in fp8 to the rows' dtype. With bfloat16 and exact sums this alone costs 0.2 % of the norm
    (0.3 % in the worst row); a scale that is off by 1 / 32 costs 2.4 % or more.
    """
    assert largest_error(out, expected) <= (2**-7 if out.dtype == torch.bfloat16 else 1e-5)


def check_heads(device: str, dtype: torch.dtype) -> None:
    """Check W_UK and W_UV, as values and in fp8, whatever the number of heads that a rank holds."""
    in_fp8 = blocks(384, 256)
    in_fp8 = Quantized(in_fp8.codes.view(3, 128, 256), in_fp8.scales.view(3, 1, 2))
    for weight in (drawn(3, 128, 256, dtype=dtype, device=device), in_fp8):
        codes, scales = (weight, None) if isinstance(weight, Tensor) else (part.to(device) for part in weight[:2])
        q, out = drawn(150, 3, 192, dtype=dtype, device=device), drawn(150, 3, 256, dtype=dtype, device=device)
        angles = drawn(150, 64, device=device)
        rest = True, None, scales, True
        absorbed = assert_rows_apart(lambda q, at: absorb_query(QueryAbsorption(q, codes, at, *rest)), q, angles)  # noqa: B023
        values = assert_rows_apart(lambda out: project_values(ValueProjection(out, codes, scales, True)), out)  # noqa: B023
        wide = codes.double() if scales is None else codes
        expected = absorb_query(QueryAbsorption(q.double(), wide, angles, True, None, scales))
        for part in (slice(0, 256), slice(256, None)):
            assert_rows_near(absorbed[..., part], expected[..., part])
        expected = project_values(ValueProjection(out.double(), wide, scales))
        assert_rows_near(*(each.unflatten(1, (3, 128)) for each in (values, expected)))
        one = slice(1, 2)
        scales_of_one = None if scales is None else scales[one]
        own = absorb_query(QueryAbsorption(q[:, one], codes[one], angles, True, None, scales_of_one, True))
        assert torch.equal(own, absorbed[:, one])
        # What `OutputRows` appends to other rows, plain and quantized.
        w_uv = codes if scales is None else Quantized(codes, scales)
        for quant in (None, *([OutputQuant("fp8_groups")] if dtype == torch.bfloat16 else [])):
            rows = OutputRows(151, w_uv, dtype, quant, is_deterministic=True)
            rows.project(out[:1])
            rows.project(out)
            result = rows.rows()
            parts = result if isinstance(result, Tensor) else result.values.float()
            assert torch.equal(parts[:1], parts[1:2])
            if quant is None:
                assert torch.equal(parts[1:], values)


def test_heads_on_a_cpu() -> None:
    check_heads("cpu", torch.float32)


def check_ranks() -> None:
    """Check that ranks sum in float32, one after the other, and round once."""
    group, size = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    weight, x = drawn(72, 512, dtype=torch.bfloat16), drawn(20, 512, dtype=torch.bfloat16, seed=1)
    parts = [(slice(None), slice(at * 512 // size, (at + 1) * 512 // size)) for at in range(size)]
    linear = RowParallelLinear(512, 72, False, group, dtype=torch.bfloat16)
    linear.load(weight[:, shard(512, group)])
    linear.is_deterministic = True
    total = torch.zeros(20, 72)
    for part in parts:
        total += fixed_linear(x[part], weight[part], torch.bfloat16)
    own = parts[dist.get_rank()]
    assert torch.equal(linear(x[own]), total.bfloat16())
    for rows in (slice(1), slice(3, 4), slice(2, 17)):
        assert torch.equal(linear(x[rows][own]), total[rows].bfloat16())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_row_parallel(num_ranks: int) -> None:
    run_ranks(num_ranks, check_ranks)


def check_kernel(device: str, dtype: torch.dtype, num_tokens: int, num_rows: int, width: int) -> None:
    """Compare with float64, rows that are cut out of wider ones, between rows of NaN."""
    from dcpmla.parallel.kernels import fixed

    wide = torch.full((num_tokens + 2, width + 24), torch.nan)
    wide[1:-1, :width] = drawn(num_tokens, width)
    x = wide.to(device, dtype)[1:-1, :width]
    if dtype == FP8:
        weight, x = blocks(num_rows, width, device=device), drawn(num_tokens, width, device=device)
        out = torch.empty(num_tokens, num_rows, dtype=torch.bfloat16, device=device)
        rows = quantized(x)
        fixed.multiply(*rows, *weight[:2], out)
        expected = exact(rows, weight)
    else:
        weight = drawn(num_rows, width, dtype=dtype, device=device, seed=1)
        out = fixed.fixed_linear(x, weight, dtype)
        expected = F.linear(x.double(), weight.double())
        wider = fixed.fixed_linear(x, weight, torch.float32)
        assert (wider.double() - expected).norm() <= 1e-5 * expected.norm()
    assert out.shape == (num_tokens, num_rows)
    assert (out.double() - expected).norm() <= 2**-8 * expected.norm()


def check_forms(device: str, dtype: torch.dtype, num_tokens: int, num_rows: int, width: int) -> None:
    """Check that programs of a segment and programs of all segments both add the sums of single segments in order."""
    from dcpmla.parallel.kernels import fixed

    x, weight = drawn(num_tokens, width, device=device), blocks(num_rows, width, device=device)
    form = quantized(x) if dtype == FP8 else (x.to(dtype), None)
    factors = weight if dtype == FP8 else (drawn(num_rows, width, device=device, seed=1).to(dtype), None)
    tile = fixed.choose_tile(num_tokens, num_rows, width, dtype)

    def multiply(columns: slice, is_partial: bool) -> Tensor:
        out = torch.empty(num_tokens, num_rows, device=device)
        of_blocks = slice(columns.start // 128, columns.stop // 128)
        scales = [None if scales is None else scales[:, of_blocks] for scales in (form[1], factors[1])]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fixed, "choose_tile", lambda *_: tile._replace(is_partial=is_partial))
            fixed.multiply(form[0][:, columns], scales[0], factors[0][:, columns].contiguous(), scales[1], out)
        return out

    segment = fixed.segment_width(width)
    expected = torch.zeros(num_tokens, num_rows, device=device)
    for first in range(0, width, segment):
        expected += multiply(slice(first, min(first + segment, width)), False)
    for is_partial in (False, True):
        assert torch.equal(multiply(slice(0, width), is_partial), expected), f"is_partial={is_partial}"


def test_segments() -> None:
    """Parts of whole blocks and of at most 2,048 columns, by the depth alone."""
    from dcpmla.parallel.kernels.fixed import segment_width

    widths = {62: 128, 512: 512, 1536: 1536, 2048: 2048, 2049: 1152, 4352: 1536, 7168: 1792, 10944: 1920, 16384: 2048}
    assert {width: segment_width(width) for width in widths} == widths


def check_in_the_interpreter(device: str) -> None:
    for dtype, *sizes in (
        (torch.float16, 3, 40, 264),  # the interpreter does not multiply bfloat16
        (torch.float16, 70, 24, 128),
        (torch.float16, 0, 40, 264),
        (torch.float32, 5, 40, 62),  # rows of no multiple of 16 bytes
        (FP8, 5, 72, 256),
        (FP8, 131, 136, 128),
        (torch.float16, 3, 24, 4352),  # three segments
        (torch.float32, 2, 24, 4352),
        (FP8, 5, 72, 4352),
    ):
        check_kernel(device, dtype, *sizes)
    for dtype in (torch.float16, torch.float32, FP8):
        check_forms(device, dtype, 70, 40, 4352)


def test_kernel_in_the_interpreter() -> None:
    run_kernels("cpu", check_in_the_interpreter)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, FP8], ids=str)
def test_kernel(dtype: torch.dtype) -> None:
    for num_tokens, num_rows, width in ((1, 2112, 7168), (64, 576, 512), (65, 200, 128), (3000, 4096, 1536)):
        check_kernel("cuda", dtype, num_tokens, num_rows, width)
    for num_tokens in (1, 7, 64, 65, 300, 2000):
        check_kernel("cuda", dtype, num_tokens, 200, 4352)
        check_forms("cuda", dtype, num_tokens, 200, 4352)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, FP8], ids=str)
def test_all_tiles_give_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare tiles of many shapes with the chosen one: few and many rows, depths of one segment and of several."""
    from dcpmla.parallel.kernels import fixed

    scaled = [(16, 64), (32, 64), (16, 128), (64, 16), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128)]
    shapes = {
        1: [(*shape, 128) for shape in scaled],
        2: [(16, 64, 128), (32, 64, 64), (32, 128, 64), (64, 16, 128), (64, 64, 64), (64, 128, 64), (128, 32, 128)]
        + [(128, 64, 64), (128, 128, 64)],
        4: [(64, 32, 32), (64, 64, 32)],
    }[dtype.itemsize]
    for num_tokens, num_rows, width in ((300, 2112, 7168), (70, 300, 640)):
        x, weight = drawn(num_tokens, width, device="cuda"), blocks(num_rows, width, device="cuda")
        if dtype != FP8:
            plain = drawn(num_rows, width, dtype=dtype, device="cuda", seed=1)

        def multiply() -> Tensor:
            out = torch.empty(num_tokens, num_rows, device="cuda")  # noqa: B023
            if dtype == FP8:
                fixed.multiply(*quantize_rows(x.bfloat16()), *weight[:2], out)  # noqa: B023
            else:
                fixed.multiply(x.to(dtype), None, plain, None, out)  # noqa: B023
            return out

        expected = multiply()
        for shape, is_partial in itertools.product(shapes, (False, True) if width > 640 else (False,)):
            tile = fixed.Tile(*shape, 8 if shape[0] == 128 else 4, 2, is_partial)
            with monkeypatch.context() as patch:
                patch.setattr(fixed, "choose_tile", lambda *_: tile)  # noqa: B023
                assert torch.equal(multiply(), expected), tile


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP8], ids=str)
def test_chosen_tiles_fit(dtype: torch.dtype) -> None:
    """A Hopper GPU gives a program 227 KB of shared memory; scales are of 128 rows and columns; segments of 128."""
    from dcpmla.parallel.kernels.fixed import choose_tile

    sizes = (1, 16, 17, 32, 33, 64, 65, 128, 129, 300, 1000, 2048, 8192)
    for num_tokens, num_rows, width in itertools.product(sizes, (16, 512, 2112, 7168, 130_000), (64, 1536, 7168)):
        tile = choose_tile(num_tokens, num_rows, width, dtype)
        stage = (tile.tokens + tile.rows) * tile.depth * dtype.itemsize
        assert 2 <= tile.num_stages <= 224 * 1024 // stage, tile
        assert max(tile.tokens, tile.rows) >= 64, tile
        assert 128 % tile.depth == 0, tile
        assert not tile.is_partial or width == 7168, tile
        if dtype == FP8:
            assert (tile.depth, 128 % tile.rows) == (128, 0), tile


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_on_a_gpu(dtype: torch.dtype) -> None:
    for num_rows, width in ((2112, 7168), (200, 256)):
        x, weight = drawn(300, width, dtype=dtype, device="cuda"), drawn(num_rows, width, dtype=dtype, device="cuda")
        assert_rows_apart(lambda x: fixed_linear(x, weight, x.dtype), x)  # noqa: B023
        codes, arrivals = blocks(num_rows, width, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
        assert_rows_apart(lambda x: fp8_linear(Fp8Product(x, None, *codes[:2], arrivals, x.dtype, True)), x)  # noqa: B023
    check_layers("cuda", dtype)
    check_heads("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(2112, 7168), (7168, 2048), (129280, 7168), (576, 2048)])
def test_a_warm_up_compiles_every_tile(num_rows: int, width: int, dtype: torch.dtype) -> None:
    from dcpmla.parallel.kernels.fixed import choose_tile

    for largest in (2048, 5000):
        known = {choose_tile(size, num_rows, width, dtype) for size in warm_up_sizes(largest)}
        assert {choose_tile(size, num_rows, width, dtype) for size in range(1, largest + 1)} <= known


@pytest.mark.parametrize("dtype", ["bf16", "fp8e4nv"])
@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "width"), [(1, 2112, 7168), (128, 2112, 7168), (4096, 2112, 7168), (4096, 7168, 2048)]
)
def test_the_kernel_compiles_for_hopper(dtype: str, num_tokens: int, num_rows: int, width: int) -> None:
    """Few and many rows by the same kind of instruction, which follow each other, and no register in memory."""
    from triton.compiler import ASTSource

    from dcpmla.parallel.kernels.fixed import choose_tile, fixed_linear_kernel, segment_width
    from tests.attention.test_decode_compile import build_for_hopper

    tile = choose_tile(num_tokens, num_rows, width, FP8 if dtype == "fp8e4nv" else torch.bfloat16)
    types = {"out_ptr": "*fp32" if tile.is_partial else "*bf16", "x_scales_ptr": "*fp32", "weight_scales_ptr": "*fp32"}
    types |= {
        name: f"tensordesc<{dtype}[{rows}, {tile.depth}]>"
        for name, rows in (("x_desc", tile.tokens), ("weight_desc", tile.rows))
    }
    segment = segment_width(width)
    constants = {"STAGES": tile.num_stages, "IS_PARTIAL": tile.is_partial}
    constants |= {"SEGMENT": segment if segment < width else None}
    if dtype == "bf16":
        constants |= {"x_scales_ptr": None, "weight_scales_ptr": None}
    options = {"num_warps": tile.num_warps, "enable_fp_fusion": False}
    compiled, said = build_for_hopper(
        fixed_linear_kernel, ASTSource, types, constants, ("num_rows", "num_columns"), **options
    )
    ptx = compiled.asm["ptx"]
    short = tile.rows if tile.tokens >= 64 else tile.tokens
    assert re.search(rf"wgmma.mma_async.sync.aligned.m64n{short}k{16 if dtype == 'bf16' else 32}", ptx)
    assert "cp.async.bulk.tensor" in ptx
    assert compiled.metadata.shared > (tile.num_stages - 1) * (tile.tokens + tile.rows) * tile.depth
    assert "wgmma.mma_async instructions are serialized" not in said
    assert "0 bytes spill stores" in said


def test_operators() -> None:
    x, weight = drawn(3, 64), drawn(8, 64)
    torch.library.opcheck(fixed_linear.op, (x, weight, torch.bfloat16))
