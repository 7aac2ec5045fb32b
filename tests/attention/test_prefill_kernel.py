"""The Triton kernels of prefill: in Triton's interpreter against float64, compiled for Hopper, with tiles that fit."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.attention import prefill as operators
from dcpmla.attention import reference
from dcpmla.attention.backends import PREFILL_BACKENDS, find_backend
from dcpmla.attention.calls import PrefillCall, Segments, join_keys
from dcpmla.merge import merge_partials
from tests.attention import test_decode_compile
from tests.support.backends import as_kernel
from tests.support.shared_memory import run_interpreted

triton = pytest.importorskip("triton")

SCALE = 0.17
HOPPER_SHARED_MEMORY = 232448  # bytes that a program may use
Case = tuple[
    list[int], list[int] | None, int, tuple[int, int, int]
]  # query_lens, key_lens (None: causal), heads, (P, R, V)
CASES: dict[str, Case] = {  # tails, single rows, requests without keys, dims that are no powers of 2
    "causal": ([37, 1, 130, 64], None, 2, (32, 16, 32)),
    "causal, several tiles": ([300], None, 1, (16, 16, 16)),
    "context": ([5, 70, 33], [64, 1, 137], 3, (32, 16, 32)),
    "requests without keys": ([3, 40, 2, 9], [0, 16, 0, 50], 2, (16, 16, 16)),
    "many requests": ([1, 2] * 10 + [140, 3], [3, 0] * 10 + [1, 260], 1, (16, 16, 16)),
    "dims of a tiny model": ([19, 33], None, 2, (16, 8, 24)),
    "odd dims": ([19, 33], [40, 7], 2, (48, 16, 32)),
    "DeepSeek-V3": ([17, 150], None, 1, (128, 64, 128)),
    "DeepSeek-V3, context": ([17, 5], [170, 20], 1, (128, 64, 128)),
    "DeepSeek-V3, requests without keys": ([30, 5, 9], [0, 140, 0], 2, (128, 64, 128)),
    "GLM-5": ([9, 70], None, 1, (192, 64, 256)),
}


def segments(lens: Sequence[int], device: str) -> Segments:
    start = tuple(sum(lens[:count]) for count in range(len(lens) + 1))
    return Segments(start, torch.tensor(start, dtype=torch.int32, device=device))


def poisoned(rows: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """Return the same rows as a view with NaN before, after and beside them."""
    whole = torch.full(
        (rows.shape[0] + 200, *rows.shape[1:-1], rows.shape[-1] + 16), torch.nan, dtype=dtype, device=device
    )
    view = whole[8 : 8 + rows.shape[0], ..., 8 : 8 + rows.shape[-1]]
    return view.copy_(rows)


def check_prefill(
    prefill: Callable[[PrefillCall], tuple[Tensor, Tensor]], case: Case, dtype: torch.dtype, device: str
) -> None:
    """Compare a backend's (out, lse) with float64."""
    query_lens, key_lens, num_heads, (nope, rope, v_head_dim) = case
    queries, keys = segments(query_lens, device), segments(query_lens if key_lens is None else key_lens, device)
    generator = torch.Generator().manual_seed(0)
    num_tokens, num_keys = queries.start[-1], keys.start[-1]
    shapes = [
        (num_tokens, num_heads, nope + rope),
        (num_keys, num_heads, nope),
        (num_keys, rope),
        (num_keys, num_heads, v_head_dim),
    ]
    q, k_nope, k_pe, v = (poisoned(torch.randn(shape, generator=generator), dtype, device) for shape in shapes)
    out, lse = prefill(PrefillCall(q, k_nope, k_pe, v, *queries, *keys, SCALE, key_lens is None))
    wanted, wanted_lse = reference.mha_prefill(
        *(rows.double().cpu() for rows in (q, join_keys(k_nope, k_pe), v)),
        queries.start,
        keys.start,
        SCALE,
        key_lens is None,
    )
    assert (out.dtype, lse.dtype, out.shape, lse.shape) == (dtype, torch.float32, wanted.shape, wanted_lse.shape)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out.double().cpu(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.cpu(), wanted_lse, atol=2e-4, rtol=1e-4)


def check_unaligned(device: str) -> None:
    """Rows that no descriptor may point to."""
    from dcpmla.attention.triton.prefill import run

    mha_prefill = as_kernel(run, PrefillCall)

    generator = torch.Generator().manual_seed(0)
    q, k_nope, v = (torch.randn(9, 2, width, generator=generator).half().to(device) for width in (24, 19, 21))
    k_pe = torch.randn(9, 13, generator=generator).half().to(device)
    k_nope, k_pe, v = k_nope[..., 3:], k_pe[:, 5:], v[..., 1:]
    queries = segments([2, 7], device)
    out, lse = mha_prefill(q, k_nope, k_pe, v, *queries, *queries, SCALE, True)
    wanted = reference.mha_prefill(
        q.double(), join_keys(k_nope, k_pe).double(), v.double(), queries.start, queries.start, SCALE, True
    )
    torch.testing.assert_close(out.double(), wanted[0], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, wanted[1], atol=2e-4, rtol=1e-4)


def check_neighbours(backend: str, dims: tuple[int, int, int], device: str) -> None:
    """Check that a request whose rows are NaN spoils no other's."""
    mha_prefill = as_kernel(find_backend(PREFILL_BACKENDS, backend).run, PrefillCall)
    nope, rope, v_head_dim = dims
    generator = torch.Generator().manual_seed(0)
    q, k_nope, v = (
        torch.randn(30, 2, width, generator=generator).half().to(device) for width in (nope + rope, nope, v_head_dim)
    )
    k_pe, lens = torch.randn(30, rope, generator=generator).half().to(device), segments([10, 10, 10], device)
    for causal in (True, False):
        wanted = mha_prefill(q, k_nope, k_pe, v, *lens, *lens, SCALE, causal)
        spoiled = [
            tensor.index_fill(0, torch.arange(10, 20, device=device), torch.nan) for tensor in (q, k_nope, k_pe, v)
        ]
        got = mha_prefill(*spoiled, *lens, *lens, SCALE, causal)
        for one, other in zip(got, wanted, strict=True):
            assert one[10:20].isnan().all()
            torch.testing.assert_close(one[:10], other[:10], atol=0, rtol=0)
            torch.testing.assert_close(one[20:], other[20:], atol=0, rtol=0)


def check_triton(dtype: torch.dtype, device: str) -> None:
    for case in CASES.values():
        check_prefill(find_backend(PREFILL_BACKENDS, "triton").run, case, dtype, device)


def check_merge_part(device: str) -> None:
    """Like `merge_partials`: empty rows on either side, on both, with NaN in them; each output's dtype."""
    from dcpmla.attention.triton.merge import merge_part

    generator = torch.Generator().manual_seed(0)
    half, brain = torch.float16, torch.bfloat16
    cases = [((5, 3, 32), torch.float32, torch.float32), ((7, 1, 24), half, torch.float32), ((1, 8, 128), brain, brain)]
    if device == "cuda":
        cases += [((8192, 16, 128), brain, brain), ((30_001, 3, 24), half, torch.float32)]
    for (num_tokens, num_heads, width), part_dtype, dtype in cases:
        out, part = torch.randn(2, num_tokens, num_heads, width, generator=generator)
        lse, part_lse = 30 * torch.randn(2, num_tokens, num_heads, generator=generator)
        out, part = out.to(dtype), part.to(part_dtype)
        for rows, row_lse, index in ((out, lse, 0), (part, part_lse, 1), (out, lse, 2), (part, part_lse, 2)):
            if index < lse.numel():
                rows.flatten(0, 1)[index], row_lse.view(-1)[index] = torch.nan, -torch.inf
        wanted, wanted_lse = merge_partials(torch.stack([out.double(), part.double()]), torch.stack([lse, part_lse]))
        merged, merged_lse = merge_part(*(rows.to(device) for rows in (out, lse, part, part_lse)), dtype)
        assert merged.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(merged.double().cpu(), wanted, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(merged_lse.cpu(), wanted_lse, atol=1e-5, rtol=1e-6)


def check_operators(device: str, dtype: torch.dtype) -> None:
    """Check schema, shapes and strides that tracing is told, what is written: `torch.library.opcheck`."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = segments([3, 1], device), segments([0, 5], device)
    q, kv, latents = (
        torch.randn(shape, generator=generator).to(device, dtype) for shape in ((4, 2, 24), (5, 2, 32), (5, 48))
    )
    for num_tokens, lens, causal in ((4, queries, True), (5, keys, False)):  # keys and values, rope parts as they lie
        rows = (q, kv[:num_tokens, :, :16], latents[:num_tokens, 32:40], kv[:num_tokens, :, 16:])
        torch.library.opcheck(operators.mha_prefill.op, tuple(PrefillCall(*rows, *queries, *lens, SCALE, causal)))
    for width in (16, 17):
        out, part = torch.randn(2, 3, 2, width, generator=generator).to(device)
        lse, part_lse = torch.randn(2, 3, 2, generator=generator).to(device)
        torch.library.opcheck(operators.merge_part.op, (out, lse, part.to(dtype), part_lse, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators(dtype: torch.dtype) -> None:
    check_operators("cpu", dtype)


def check_in_the_interpreter() -> None:
    check_triton(torch.float16, "cpu")
    check_unaligned("cpu")
    check_neighbours("triton", (16, 16, 16), "cpu")
    check_merge_part("cpu")


def test_in_the_interpreter() -> None:
    run_interpreted(1, check_in_the_interpreter)


@pytest.mark.parametrize(
    ("dims", "causal", "has_mask"),
    [
        ((128, 64, 128), True, False),
        ((128, 64, 128), False, False),
        ((128, 64, 128), False, True),
        ((192, 64, 256), True, True),
        ((48, 16, 32), False, False),
    ],
)
def test_mha_prefill_compiles_for_hopper(dims: tuple[int, int, int], causal: bool, has_mask: bool) -> None:
    """With the tiles that such heads get, within a program's shared memory."""
    from dcpmla.attention.triton.prefill import mha_prefill_kernel, select_tiling

    tile_dims = [max(16, triton.next_power_of_2(dim)) for dim in dims]
    tiling = select_tiling(tile_dims[0] + tile_dims[1], tile_dims[2], HOPPER_SHARED_MEMORY)
    constants: dict[str, int | None] = dict(
        zip(("P", "R", "V", "P_TILE", "R_TILE", "V_TILE"), (*dims, *tile_dims), strict=True)
    )
    constants |= {"CAUSAL": causal, "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n}
    if not has_mask:
        constants |= {"mask_ptr": None, "num_words": None}
    types = {
        "scale_log2": "fp32",
        "lse_ptr": "*fp32",
        "query_start_loc_ptr": "*i32",
        "key_start_loc_ptr": "*i32",
        "mask_ptr": "*i32",
    }
    types |= {"q_ptr": "*bf16", "out_ptr": "*bf16", "k_pe_desc": f"tensordesc<bf16[{tiling.block_n}, {tile_dims[1]}]>"}
    types |= {
        name: f"tensordesc<bf16[1, {tiling.block_n}, {dim}]>"
        for name, dim in (("k_nope_desc", tile_dims[0]), ("v_desc", tile_dims[2]))
    }
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    compiled = compile_for_hopper(mha_prefill_kernel, types, constants, options)
    assert "wgmma" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= HOPPER_SHARED_MEMORY


@pytest.mark.parametrize(
    ("dtype", "causal", "has_mask"),
    [("bf16", True, False), ("bf16", False, True), ("fp16", False, False), ("fp16", True, True)],
)
def test_the_hopper_kernel_compiles(dtype: str, causal: bool, has_mask: bool) -> None:
    """The softmax of a tile precedes the wait for the product of the values of the tile before. Before the softmax each
    score is tested by itself, and each thread loads the words of its two rows for the next tile.
    """
    from triton.experimental.gluon._runtime import GluonASTSource

    from dcpmla.attention.hopper.prefill import prefill_kernel
    from dcpmla.attention.hopper.prefill_pipeline import KEYS, NOPE, ROPE, ROWS, TILE, VALUE

    def tiles(num_rows: Any, num_columns: Any) -> str:
        return f"tensordesc<{dtype}[{num_rows.value}, {num_columns.value}],{TILE.value}>"

    types = {"q_nope_desc": tiles(ROWS, NOPE), "q_pe_desc": tiles(ROWS, ROPE), "v_desc": tiles(KEYS, VALUE)}
    types |= {"k_nope_desc": tiles(KEYS, NOPE), "k_pe_desc": tiles(KEYS, ROPE), "out_ptr": f"*{dtype}"}
    types |= {"lse_ptr": "*fp32", "query_start_loc_ptr": "*i32", "key_start_loc_ptr": "*i32", "scale_log2": "fp32"}
    constants: dict[str, Any] = {"IS_CAUSAL": causal}
    if has_mask:
        types["mask_ptr"] = "*i32"
    else:
        constants |= {"mask_ptr": None, "num_words": None}
    ptx, said = test_decode_compile.compile_for_hopper(prefill_kernel, GluonASTSource, types, constants, num_warps=4)
    assert "wgmma.mma_async.sync.aligned.m64n128k16" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "0 bytes spill stores" in said
    assert "wgmma.mma_async instructions are serialized" not in said
    loop = ptx[ptx.index("wgmma.wait_group.sync.aligned 1") :]
    softmax = loop[: loop.index("wgmma.wait_group.sync.aligned 0")]
    assert softmax.count("ex2.approx") >= 64
    assert softmax.count("selp.f32") == (64 if has_mask else 0)
    assert softmax.count("ld.global") == (8 if has_mask else 0)
    assert "mbarrier.try_wait" in softmax[softmax.rindex("ex2.approx") :]  # past which the assembler moves no wait


def test_merge_part_compiles_for_hopper() -> None:
    from dcpmla.attention.triton.merge import merge_part_kernel

    types = {"merged_ptr": "*bf16", "out_ptr": "*fp32", "part_ptr": "*bf16"}
    types |= dict.fromkeys(("merged_lse_ptr", "lse_ptr", "part_lse_ptr"), "*fp32")
    compiled = compile_for_hopper(merge_part_kernel, types, {"WIDTH": 128, "COLUMNS": 128, "ROWS": 32}, {})
    assert "sm_90a" in compiled.asm["ptx"]


def compile_for_hopper(
    kernel: Any, types: dict[str, str], constants: dict[str, int | None], options: dict[str, int]
) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(kernel.arg_names)
        if name not in constants and ("_ptr" in name or "_stride" in name)
    }
    return triton.compile(
        ASTSource(kernel, signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
        options=options,
    )


def test_tilings_fit() -> None:
    """Each takes less than the one before; heads of up to 256 find one in the 99 KiB of small GPUs, DeepSeek's the best
    one on Hopper.
    """
    from dcpmla.attention.triton.prefill import TILINGS, select_tiling

    sizes = [tiling.shared_memory(192, 128) for tiling in TILINGS]
    assert sizes == sorted(sizes, reverse=True)
    assert select_tiling(192, 128, HOPPER_SHARED_MEMORY) == TILINGS[0]
    assert select_tiling(320, 256, 101376).shared_memory(320, 256) <= 101376
