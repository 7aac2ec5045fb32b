"""The Triton kernels of prefill against float64: in Triton's interpreter, compiled for Hopper, on GPUs; and every
backend that there is.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.attention import flashinfer, reference
from dcpmla.attention import prefill as operators
from dcpmla.attention.backends import PREFILL_BACKENDS, find_backend
from dcpmla.attention.calls import PrefillCall, Segments, join_keys
from dcpmla.merge import merge_partials
from tests.attention import test_decode_compile
from tests.support.backends import as_kernel, prefill_call
from tests.support.shared_memory import run_interpreted

triton = pytest.importorskip("triton")

SCALE = 0.17
DEEPSEEK = (128, 64, 128)  # P, R, V
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
LARGER_CASES: dict[str, Case] = {  # for GPUs: lengths around tiles of 64 and 128, more heads than run side by side
    "lengths around a tile": ([1, 63, 0, 64, 127, 128, 129, 1000], None, 9, (128, 64, 128)),
    "long": ([4097], None, 2, (128, 64, 128)),
    "context, lengths around a tile": ([129, 3, 0, 7, 64, 65], [511, 128, 5, 0, 4097, 1], 9, (128, 64, 128)),
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
    out, lse = prefill(PrefillCall(q, k_nope, k_pe, v, queries, keys, SCALE, key_lens is None))
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
    out, lse = mha_prefill(q, k_nope, k_pe, v, queries, queries, SCALE, True)
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
        wanted = mha_prefill(q, k_nope, k_pe, v, lens, lens, SCALE, causal)
        spoiled = [
            tensor.index_fill(0, torch.arange(10, 20, device=device), torch.nan) for tensor in (q, k_nope, k_pe, v)
        ]
        got = mha_prefill(*spoiled, lens, lens, SCALE, causal)
        for one, other in zip(got, wanted, strict=True):
            assert one[10:20].isnan().all()
            torch.testing.assert_close(one[:10], other[:10], atol=0, rtol=0)
            torch.testing.assert_close(one[20:], other[20:], atol=0, rtol=0)


def find_kernel(
    name: str, dims: tuple[int, int, int], dtype: torch.dtype
) -> Callable[[PrefillCall], tuple[Tensor, Tensor]]:
    """Return a backend's `run`; skip the test where it does not take such heads on this GPU."""
    backend = find_backend(PREFILL_BACKENDS, name)
    q, k_pe, v = (torch.empty(1, 1, dim, dtype=dtype, device="cuda") for dim in (sum(dims[:2]), *dims[1:]))
    if obstacle := backend.obstacle(prefill_call(q, k_pe[0], v)):
        pytest.skip(f"{name}: {obstacle}")
    return backend.run


def check_triton(dtype: torch.dtype, device: str) -> None:
    for case in CASES.values():
        check_prefill(find_backend(PREFILL_BACKENDS, "triton").run, case, dtype, device)


def check_merge_into(device: str) -> None:
    """Like `merge_partials`: empty rows on either side, on both, with NaN in them."""
    from dcpmla.attention.triton.merge import merge_into

    generator = torch.Generator().manual_seed(0)
    cases = [((5, 3, 32), torch.float32), ((7, 1, 24), torch.float16), ((1, 8, 128), torch.bfloat16)]
    if device == "cuda":  # in place: programs that read what they have written are wrong in few rows of many
        cases += [((8192, 16, 128), torch.bfloat16), ((30_001, 3, 24), torch.float16)]
    for (num_tokens, num_heads, width), dtype in cases:
        out, part = torch.randn(2, num_tokens, num_heads, width, generator=generator)
        lse, part_lse = 30 * torch.randn(2, num_tokens, num_heads, generator=generator)
        part = part.to(dtype)
        wanted, wanted_lse = out, lse
        for rows, row_lse, index in ((out, lse, 0), (part, part_lse, 1), (out, lse, 2), (part, part_lse, 2)):
            if index < lse.numel():
                rows.flatten(0, 1)[index], row_lse.view(-1)[index] = torch.nan, -torch.inf
        wanted, wanted_lse = merge_partials(torch.stack([out, part.float()]).double(), torch.stack([lse, part_lse]))
        merged, merged_lse = out.to(device), lse.to(device)
        merge_into(merged, merged_lse, part.to(device), part_lse.to(device))
        torch.testing.assert_close(merged.double().cpu(), wanted, atol=1e-5, rtol=1e-5)
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
        torch.library.opcheck(operators.mha_prefill, (*rows, *queries, *lens, SCALE, causal))
    for width in (16, 17):
        out, part = torch.randn(2, 3, 2, width, generator=generator).to(device)
        lse, part_lse = torch.randn(2, 3, 2, generator=generator).to(device)
        torch.library.opcheck(operators.merge_into, (out, lse, part.to(dtype), part_lse))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators(dtype: torch.dtype) -> None:
    check_operators("cpu", dtype)


def check_in_the_interpreter() -> None:
    check_triton(torch.float16, "cpu")
    check_unaligned("cpu")
    check_neighbours("triton", (16, 16, 16), "cpu")
    check_merge_into("cpu")


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


def test_the_hopper_kernel_compiles() -> None:
    """The softmax of a tile lies before the wait for the product of the values of the tile before."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from dcpmla.attention.hopper.prefill import KEYS, NOPE, ROPE, ROWS, TILE, VALUE, prefill_kernel

    def tiles(num_rows: Any, num_columns: Any) -> str:
        return f"tensordesc<bf16[{num_rows.value}, {num_columns.value}],{TILE.value}>"

    types = {"q_nope_desc": tiles(ROWS, NOPE), "q_pe_desc": tiles(ROWS, ROPE), "v_desc": tiles(KEYS, VALUE)}
    types |= {"k_nope_desc": tiles(KEYS, NOPE), "k_pe_desc": tiles(KEYS, ROPE), "out_ptr": "*bf16"}
    types |= {"lse_ptr": "*fp32", "query_start_loc_ptr": "*i32", "key_start_loc_ptr": "*i32", "scale_log2": "fp32"}
    ptx, said = test_decode_compile.compile_for_hopper(
        prefill_kernel, GluonASTSource, types, {"IS_CAUSAL": True}, num_warps=4
    )
    assert "wgmma.mma_async.sync.aligned.m64n128k16" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "0 bytes spill stores" in said
    assert "wgmma.mma_async instructions are serialized" not in said
    loop = ptx[ptx.index("wgmma.wait_group.sync.aligned 1") :]
    softmax = loop[: loop.index("wgmma.wait_group.sync.aligned 0")]
    assert softmax.count("ex2.approx") >= 64
    assert "mbarrier.try_wait" in softmax[softmax.rindex("ex2.approx") :]  # past which the assembler moves no wait


def test_merge_into_compiles_for_hopper() -> None:
    from dcpmla.attention.triton.merge import merge_into_kernel

    types = {"out_ptr": "*fp32", "lse_ptr": "*fp32", "part_ptr": "*bf16", "part_lse_ptr": "*fp32"}
    compiled = compile_for_hopper(merge_into_kernel, types, {"WIDTH": 128, "COLUMNS": 128, "ROWS": 8}, {})
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


class FlashInferPlan:
    """Of FlashInfer, as seen on a GPU: LSE in base 2, and no (0, -inf) for requests without keys."""

    def __init__(self, query_start: tuple[int, ...], key_start: tuple[int, ...], causal: bool) -> None:
        self.bounds, self.causal = (query_start, key_start), causal

    def run(self, q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
        assert return_lse
        out, lse = reference.mha_prefill(q, k, v, *self.bounds, SCALE, self.causal)
        is_empty = lse == -torch.inf
        return out.masked_fill(is_empty[..., None], torch.nan), (lse / math.log(2)).masked_fill(is_empty, 0.0)


def test_flashinfers_requests_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "_plan_prefill", lambda *plan: FlashInferPlan(plan[0], plan[1], plan[6]))
    check_prefill(flashinfer.run_prefill, CASES["DeepSeek-V3, requests without keys"], torch.bfloat16, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES | LARGER_CASES)
@pytest.mark.parametrize("name", [backend.name for backend in PREFILL_BACKENDS])
def test_backend_on_a_gpu(name: str, case: str, dtype: torch.dtype) -> None:
    lens_and_dims = (CASES | LARGER_CASES)[case]
    check_prefill(find_kernel(name, lens_and_dims[3], dtype), lens_and_dims, dtype, "cuda")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_unaligned("cuda")
    check_neighbours("triton", (16, 16, 16), "cuda")
    check_merge_into("cuda")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check_operators("cuda", dtype)


@pytest.mark.gpu
def test_neighbours_on_hopper() -> None:
    find_kernel("hopper", DEEPSEEK, torch.float16)
    check_neighbours("hopper", DEEPSEEK, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_in_a_graph(name: str) -> None:
    """No sync with the host: it can be captured, and a replay reads the starts anew."""
    mha_prefill = as_kernel(find_kernel(name, DEEPSEEK, torch.bfloat16), PrefillCall)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k_nope, v = (
        torch.randn(200, 2, dim, device="cuda", dtype=torch.bfloat16, generator=generator) for dim in (192, 128, 128)
    )
    k_pe = torch.randn(200, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
    captured, other = segments([150, 50], "cuda"), segments([30, 170], "cuda")
    wanted = mha_prefill(q, k_nope, k_pe, v, other, other, SCALE, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = mha_prefill(q, k_nope, k_pe, v, captured, captured, SCALE, True)
    captured.start_loc.copy_(other.start_loc)
    graph.replay()
    torch.testing.assert_close(got, wanted, atol=0, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_past_2_31_elements(name: str) -> None:
    """Keys whose offset in elements takes more than 32 bits."""
    mha_prefill = as_kernel(find_kernel(name, DEEPSEEK, torch.bfloat16), PrefillCall)
    num_keys, num_heads = 90_000, 128
    kv = torch.zeros(num_keys, num_heads, 256, device="cuda", dtype=torch.bfloat16)  # 5.9 GB
    k_pe = torch.zeros(num_keys, 64, device="cuda", dtype=torch.bfloat16)
    q = torch.ones(2, num_heads, 192, device="cuda", dtype=torch.bfloat16)
    kv[-1, :, :128], kv[-1, :, 128:] = 1.0, 7.0  # the last key alone counts
    queries, keys = segments([1, 1], "cuda"), segments([num_keys - 5, 5], "cuda")
    out, lse = mha_prefill(q, kv[..., :128], k_pe, kv[..., 128:], queries, keys, 1.0, False)
    torch.testing.assert_close(out[1], torch.full_like(out[1], 7.0))
    torch.testing.assert_close(lse[1], torch.full_like(lse[1], 128.0))
    torch.testing.assert_close(out[0], torch.zeros_like(out[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("workspace", [64, 4096])
def test_dcp_mla_prefill_on_a_gpu(workspace: int) -> None:
    """The whole path in bfloat16, heads of DeepSeek-V3, context in many chunks or one, against the same in float64 on
    the CPU.
    """
    from dcpmla import DCPConfig, StepMetadata, dcp_mla_prefill
    from dcpmla.comm.exchange import LocalExchange

    query_lens, seq_lens, num_heads = [150, 7, 33], [450, 7, 40], 4
    dcp = DCPConfig(block_size=16, context_workspace_tokens=workspace)
    tables = [list(range(29)), [29], [32, 31, 30]]
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    inputs = (
        rows(190, num_heads, 192),
        rows(190, 512),
        rows(190, 64),
        rows(33, 16, 576),
        rows(num_heads, 256, 512) / 512**0.5,
    )

    def run(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        prefill = StepMetadata.build(query_lens, seq_lens, tables, dcp, 0, device).prefill
        assert prefill is not None
        assert len(prefill.context_chunks) == (10 if workspace == 64 else 1)
        out, lse = dcp_mla_prefill(
            *(tensor.to(device, dtype) for tensor in inputs), prefill, 192**-0.5, LocalExchange()
        )
        return out.double().cpu(), lse.cpu()

    (out, lse), (wanted, wanted_lse) = run("cuda", torch.bfloat16), run("cpu", torch.float64)
    assert (out - wanted).norm() < 1e-2 * wanted.norm()
    torch.testing.assert_close(lse, wanted_lse, atol=2e-2, rtol=2e-3)
