"""Prefill over selected positions: the mask's bits, kernels under a mask, the whole path against float64 over exactly
what is selected.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dcpmla import DCPConfig, dcp_mla_prefill
from dcpmla.attention import obstacles, reference
from dcpmla.attention import prefill as operators
from dcpmla.attention.backends import PREFILL_BACKENDS
from dcpmla.attention.build import StepBuilder
from dcpmla.attention.calls import PrefillCall, join_keys
from dcpmla.attention.sparse.mask import selection_mask, unpack_mask
from dcpmla.attention.step import StepRequests
from dcpmla.cache.formats import write_latents
from dcpmla.comm.exchange import LocalExchange
from tests.attention.test_prefill_backends import DEEPSEEK, LARGER_CASES, find_kernel
from tests.attention.test_prefill_kernel import Case, compile_for_hopper, poisoned, segments
from tests.attention.test_reference import SCALE, L, P, R, V, attend_heads, check_close
from tests.attention.test_reference_prefill import AllRanks
from tests.support.backends import as_kernel, prefill_call
from tests.support.shared_memory import run_interpreted
from tests.test_ownership import deal_slots

triton = pytest.importorskip("triton")


def select(seq_lens: Sequence[int], topk: int, seed: int = 0) -> Tensor:
    """[T, topk] positions at random, without order, of tokens that have so many at their position and before; -1 after
    them.
    """
    generator = torch.Generator().manual_seed(seed)
    positions = torch.full((len(seq_lens), topk), -1, dtype=torch.int32)
    for row, seq_len in zip(positions, seq_lens, strict=True):
        chosen = torch.randperm(seq_len, generator=generator)[:topk]
        row[: len(chosen)] = chosen
    return positions


def seq_lens_of_tokens(query_lens: Sequence[int], seq_lens: Sequence[int]) -> list[int]:
    return [seq - query + 1 + index for query, seq in zip(query_lens, seq_lens, strict=True) for index in range(query)]


# ---- the mask


@settings(max_examples=60, deadline=None)
@given(
    segment=st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 80)), min_size=1, max_size=4
    ),  # tokens, first position
    num_keys=st.integers(1, 100),
    topk=st.integers(1, 40),
    seed=st.integers(0, 10**6),
)
def test_selection_mask(segment: list[tuple[int, int]], num_keys: int, topk: int, seed: int) -> None:
    """Bit for bit: positions before and after the segment, none, requests that begin elsewhere."""
    query_lens, first = zip(*segment, strict=True)
    positions = select(
        torch.randint(0, 190, (sum(query_lens),), generator=torch.Generator().manual_seed(seed)).tolist(), topk, seed
    )
    words = selection_mask(
        positions, segments(query_lens, "cpu").start_loc, torch.tensor(first, dtype=torch.int32), num_keys
    )
    assert (words.dtype, words.shape) == (torch.int32, (sum(query_lens), -(-num_keys // 32)))
    first_of_token = [begin for length, begin in segment for _ in range(length)]
    wanted = [
        [begin + key in row and key < num_keys for key in range(32 * words.shape[1])]
        for row, begin in zip(positions.tolist(), first_of_token, strict=True)
    ]
    assert [[bool(word >> bit & 1) for word in row for bit in range(32)] for row in words.tolist()] == wanted
    assert unpack_mask(words, num_keys).tolist() == [row[:num_keys] for row in wanted]


def check_mask_kernel(device: str) -> None:
    """Against the specification: rows of a wider tensor, top-k that is no power of 2, -1 everywhere, many requests."""
    from dcpmla.attention.sparse.kernels.mask import selection_mask as kernel

    for query_lens, first, topk, num_keys in (
        ([3, 1, 9], [100, 0, 31], 40, 130),
        ([1] * 17, list(range(17)), 64, 32),
        ([2], [5], 100, 1),
    ):
        positions = select(seq_lens_of_tokens(query_lens, [begin + 60 for begin in first]), topk)
        positions[0] = -1
        wide = torch.cat([positions, torch.arange(len(positions) * 3, dtype=torch.int32).view(-1, 3)], 1)
        start_loc, first_position = segments(query_lens, "cpu").start_loc, torch.tensor(first, dtype=torch.int32)
        wanted = selection_mask(positions, start_loc, first_position, num_keys)
        got = kernel(wide.to(device)[:, :topk], start_loc.to(device), first_position.to(device), num_keys)
        assert torch.equal(got.cpu(), wanted)
        assert wanted.count_nonzero()


# ---- kernels under a mask

MASKED_BACKENDS = ("hopper", "triton")
CASES: dict[str, Case] = {
    "causal": ([37, 1, 150], None, 2, (32, 16, 32)),
    "context": ([5, 70, 33], [64, 1, 300], 2, (32, 16, 32)),
    "requests without keys": ([3, 40, 2], [0, 20, 0], 1, (16, 16, 16)),
    "DeepSeek-V3": ([17, 5], [170, 20], 1, (128, 64, 128)),
    "GLM-5": ([9, 70], None, 1, (192, 64, 256)),
}


def draw_mask(num_tokens: int, num_keys: int) -> Tensor:
    """Return rows of all bits, none, one, few, and of few among the last or the first keys: tiles before or after them
    are empty.
    """
    bits = torch.rand(num_tokens, num_keys, generator=torch.Generator().manual_seed(2)) < 0.1
    bits[1::7], bits[2::7], bits[3::7] = True, False, False
    bits[3::7, num_keys // 2] = True
    bits[4::7, : num_keys - num_keys // 4] = False
    bits[5::7, num_keys // 4 :] = False
    padded = torch.nn.functional.pad(bits, (0, -num_keys % 32)).unflatten(1, (-1, 32))
    return (padded.long() << torch.arange(32)).sum(-1).to(torch.int32)


def check_masked(
    prefill: Callable[[PrefillCall], tuple[Tensor, Tensor]], case: Case, dtype: torch.dtype, device: str
) -> None:
    """Compare a backend's (out, lse) with float64, among rows of NaN."""
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
    mask = draw_mask(num_tokens, max(keys.lens))
    out, lse = prefill(PrefillCall(q, k_nope, k_pe, v, *queries, *keys, SCALE, key_lens is None, mask.to(device)))
    wide = (rows.double().cpu() for rows in (q, join_keys(k_nope, k_pe), v))
    wanted, wanted_lse = reference.mha_prefill(*wide, queries.start, keys.start, SCALE, key_lens is None, mask)
    assert 0 < (wanted_lse == -torch.inf).sum() < wanted_lse.numel()
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out.double().cpu(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.cpu(), wanted_lse, atol=2e-4, rtol=1e-4)


def check_in_the_interpreter() -> None:
    from dcpmla.attention.triton import prefill as kernels

    check_mask_kernel("cpu")
    for case in CASES.values():
        check_masked(kernels.run, case, torch.float16, "cpu")
    for tiling in kernels.TILINGS[1:]:  # half a word of keys, one, two
        kernels.TILINGS = (tiling,)
        check_masked(kernels.run, CASES["causal"], torch.float16, "cpu")


def test_in_the_interpreter() -> None:
    run_interpreted(1, check_in_the_interpreter)


def test_mask_kernel_compiles_for_hopper() -> None:
    from dcpmla.attention.sparse.kernels.mask import selection_mask_kernel

    types = {f"{name}_ptr": "*i32" for name in ("positions", "query_start_loc", "first_position", "words")}
    compiled = compile_for_hopper(selection_mask_kernel, types, {"TOPK": 2048, "BLOCK": 2048}, {"num_warps": 8})
    assert "sm_90a" in compiled.asm["ptx"]


def test_a_mask_passes_over_kernels_that_take_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU where all kernels of prefill could run, and on one that is no Hopper."""
    for name in ("_half_on_gpu_obstacle", "_missing_flashinfer"):
        monkeypatch.setattr(obstacles, name, lambda *_: "")
    rows = torch.empty(1, 1, 192), torch.empty(1, 64), torch.empty(1, 1, 128)
    masks = None, torch.zeros(1, 1, dtype=torch.int32)
    for obstacle, expected in (("", ["hopper", "hopper"]), ("no Hopper", ["flashinfer", "triton"])):
        monkeypatch.setattr(obstacles, "_hopper_gpu_obstacle", lambda *_, obstacle=obstacle: obstacle)
        for mask, name in zip(masks, expected, strict=True):
            call = prefill_call(*rows, mask)
            assert next(backend.name for backend in PREFILL_BACKENDS if not backend.obstacle(call)) == name


def check_operators(device: str, dtype: torch.dtype) -> None:
    """Check schema and the shapes of tracing: `torch.library.opcheck`."""
    lens, generator = segments([3, 1], device), torch.Generator().manual_seed(0)
    positions = select([8, 9, 10, 4], 5).to(device)
    torch.library.opcheck(
        selection_mask.op, (positions, lens.start_loc, torch.tensor([7, 0], dtype=torch.int32, device=device), 40)
    )
    rows = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((4, 2, 24), (4, 2, 16), (4, 8), (4, 2, 16))
    )
    call = PrefillCall(*rows, *lens, *lens, SCALE, True, draw_mask(4, 3).to(device))
    torch.library.opcheck(operators.mha_prefill.op, tuple(call))


def test_operators() -> None:
    check_operators("cpu", torch.float32)


# ---- the whole path


def naive_selected(
    q: Tensor, latents: Sequence[Tensor], w_kv_b: Tensor, query_lens: Sequence[int], positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Each new token over what it selected of its sequence, keys and values up-projected head by head in float64."""
    outs, lses = [], []
    rows = zip(q.split(list(query_lens)), positions.split(list(query_lens)), latents, strict=True)
    for queries, selected, sequence in rows:
        kv_c, k_pe = sequence.double().split([L, R], -1)
        keys = torch.stack([torch.cat([kv_c @ head[:P].T, k_pe], -1) for head in w_kv_b.double()], 1)
        values = torch.stack([kv_c @ head[P:].T for head in w_kv_b.double()], 1)
        for query, row in zip(queries, selected, strict=True):
            chosen = row[row >= 0].long()
            out, lse = attend_heads(query, keys[chosen], values[chosen], SCALE)
            outs.append(out)
            lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize(("size", "interleave", "block_size"), [(1, 1, 4), (2, 1, 4), (3, 2, 4), (4, 4, 4)])
def test_prefill_over_selected_positions(size: int, interleave: int, block_size: int) -> None:
    """Context in several chunks, of other lengths, or none; tokens that select all they have, one position, none of a
    segment.
    """
    query_lens, context_lens, num_heads, topk = [5, 3, 34], [137, 0, 2], 2, 9
    seq_lens = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
    dcp = DCPConfig(
        tensor_parallel_size=size,
        decode_context_parallel_size=size,
        cp_kv_cache_interleave_size=interleave,
        block_size=block_size,
    )
    dcp = replace(
        dcp, context_workspace_tokens=-(-44 // dcp.chunk_alignment) * dcp.chunk_alignment
    )  # shared by two requests
    counts = [len(range(0, seq_len, block_size * size)) for seq_len in seq_lens]
    tables = [list(range(sum(counts[:i]), sum(counts[: i + 1])))[::-1] for i in range(3)]
    generator = torch.Generator().manual_seed(0)
    latents = [torch.randn(seq_len, L + R, generator=generator) for seq_len in seq_lens]
    caches = [torch.full((sum(counts), block_size, L + R), torch.nan) for _ in range(size)]
    for sequence, context_len, table in zip(latents, context_lens, tables, strict=True):
        for token, (rank, slot) in enumerate(deal_slots(context_len, table, block_size, size, interleave)):
            write_latents(
                caches[rank], sequence[token : token + 1, :L], sequence[token : token + 1, L:], torch.tensor([slot])
            )
    q = torch.randn(sum(query_lens), num_heads, P + R, generator=generator)
    w_kv_b = torch.randn(num_heads, P + V, L, generator=generator)
    positions = select(seq_lens_of_tokens(query_lens, seq_lens), topk)
    positions[0], positions[1] = torch.arange(topk) * 15, -1  # context alone, in all chunks; one position of it
    positions[1, topk // 2] = 70
    positions[2] = torch.tensor([139, 137, 138] + [-1] * (topk - 3))  # new tokens alone
    steps = [StepBuilder(dcp, rank).build(StepRequests(query_lens, seq_lens, tables)) for rank in range(size)]
    new = torch.cat([sequence[len(sequence) - query :] for sequence, query in zip(latents, query_lens, strict=True)])
    wanted = naive_selected(q, latents, w_kv_b, query_lens, positions)
    for cache, step in zip(caches, steps, strict=True):
        assert step.prefill is not None
        assert len(step.prefill.context_chunks) > 2
        exchange = AllRanks(caches, steps)
        got = dcp_mla_prefill(
            q, new[:, :L], new[:, L:], cache, w_kv_b, step.prefill, SCALE, exchange, positions=positions
        )
        check_close(got, wanted, atol=1e-4)


def test_positions_of_other_tokens() -> None:
    prefill = StepBuilder(DCPConfig(block_size=4), 0).build(StepRequests([3], [3], [[0]])).prefill
    assert prefill is not None
    rows = (
        torch.zeros(3, 2, P + R),
        torch.zeros(3, L),
        torch.zeros(3, R),
        torch.zeros(1, 4, L + R),
        torch.zeros(2, P + V, L),
    )
    with pytest.raises(ValueError, match="positions has 4 rows; expected one for each of the 3 tokens of q"):
        dcp_mla_prefill(*rows, prefill, SCALE, LocalExchange(), positions=select([1, 2, 3, 4], 2))


# ---- on GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES | LARGER_CASES)
@pytest.mark.parametrize("name", MASKED_BACKENDS)
def test_masked_kernel_on_a_gpu(name: str, case: str, dtype: torch.dtype) -> None:
    lens_and_dims = (CASES | LARGER_CASES)[case]
    check_masked(find_kernel(name, lens_and_dims[3], dtype), lens_and_dims, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKED_BACKENDS)
def test_a_mask_of_all_keys_on_a_gpu(name: str) -> None:
    """The same result as without a mask, although bits past a request's keys are set."""
    mha_prefill = as_kernel(find_kernel(name, DEEPSEEK, torch.bfloat16), PrefillCall)
    generator = torch.Generator("cuda").manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    for query_lens, key_lens in (([300, 1, 129], [300, 1, 129]), ([300, 1, 129], [64, 0, 777])):
        queries, keys = segments(query_lens, "cuda"), segments(key_lens, "cuda")
        num_tokens, num_keys = queries.start[-1], keys.start[-1]
        call = rows(num_tokens, 5, 192), rows(num_keys, 5, 128), rows(num_keys, 64), rows(num_keys, 5, 128)
        mask = torch.full((num_tokens, -(-max(key_lens) // 32)), -1, dtype=torch.int32, device="cuda")
        sizes = *queries, *keys, SCALE, query_lens == key_lens
        (out, lse), (expected, expected_lse) = mha_prefill(*call, *sizes, mask), mha_prefill(*call, *sizes)
        torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-2)
        torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKED_BACKENDS)
def test_masks_past_2_31_words(name: str) -> None:
    """Rows of a mask whose offset in words takes more than 32 bits."""
    mha_prefill = as_kernel(find_kernel(name, DEEPSEEK, torch.bfloat16), PrefillCall)
    num_tokens, num_keys = 65_600, 200
    mask = torch.zeros(num_tokens, 32_800, device="cuda", dtype=torch.int32)  # 8.6 GB
    mask[-1, 5] = 1 << 7
    kv = torch.randn(num_keys, 1, 256, device="cuda", dtype=torch.bfloat16)
    k_pe = torch.randn(num_keys, 64, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(num_tokens, 1, 192, device="cuda", dtype=torch.bfloat16)
    queries, keys = segments([num_tokens], "cuda"), segments([num_keys], "cuda")
    out, lse = mha_prefill(q, kv[..., :128], k_pe, kv[..., 128:], *queries, *keys, SCALE, False, mask)
    assert torch.equal(out[-1], kv[5 * 32 + 7, :, 128:])
    assert lse[-1].isfinite().all()
    assert not out[:-1].any()
    assert (lse[:-1] == -torch.inf).all()


@pytest.mark.gpu
def test_operators_on_a_gpu() -> None:
    check_mask_kernel("cuda")
    check_operators("cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(128, 64, 128), (192, 64, 256)], ids=["DeepSeek-V3.2", "GLM-5"])
@pytest.mark.parametrize("workspace", [1024, 65536])
def test_dcp_mla_prefill_over_selected_positions_on_a_gpu(workspace: int, dims: tuple[int, int, int]) -> None:
    """In bfloat16, heads and top-k of real models, context in chunks or one, against the torch backend in float64."""
    nope, rope, v_head_dim = dims
    query_lens, seq_lens, num_heads, topk = [600, 7, 130], [4700, 7, 2200], 2, 2048
    dcp = DCPConfig(block_size=64, context_workspace_tokens=workspace)
    counts = [-(-length // 64) for length in seq_lens]
    tables = [list(range(sum(counts[:i]), sum(counts[: i + 1]))) for i in range(3)]
    generator = torch.Generator().manual_seed(0)
    positions = select(seq_lens_of_tokens(query_lens, seq_lens), topk).cuda()

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().cuda()

    num_tokens = sum(query_lens)
    latents = rows(num_tokens, 512), rows(num_tokens, rope), rows(sum(counts), 64, 512 + rope)
    inputs = rows(num_tokens, num_heads, nope + rope), *latents, rows(num_heads, nope + v_head_dim, 512) / 512**0.5
    prefill = StepBuilder(dcp, 0, "cuda").build(StepRequests(query_lens, seq_lens, tables)).prefill
    assert prefill is not None

    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cast = [tensor.to(dtype) for tensor in inputs]
        out, lse = dcp_mla_prefill(*cast, prefill, (nope + rope) ** -0.5, LocalExchange(), positions=positions)
        return out.double(), lse

    (out, lse), (wanted, wanted_lse) = run(torch.bfloat16), run(torch.float64)
    assert (out - wanted).norm() < 1e-2 * wanted.norm()
    torch.testing.assert_close(lse, wanted_lse, atol=2e-2, rtol=2e-3)
