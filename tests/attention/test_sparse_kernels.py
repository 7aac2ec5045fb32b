"""Triton kernels of the indexer against the torch code that specifies them.

They run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.attention.select import projections, scores
from dcpmla.attention.select.calls import IndexNorm, IndexQueries, IndexRotation
from dcpmla.attention.select.kernels import index_scores as score_kernels
from dcpmla.attention.select.kernels import projections as kernels
from dcpmla.cache.formats import FP8
from dcpmla.cache.index_keys import index_row_width, index_to_fp8, read_index_keys, write_index_keys
from tests.support.hopper import ptx_for_hopper
from tests.support.kernels import cut, on, on_both, randn, run_kernels

NOWHERE = 10**9  # a block that is not there
TOPK = 30
# Of each token: its request, the tokens at its position and before, those of them on this rank. Requests meet inside
# tiles of tokens; one is short enough to be selected whole, one has nothing here, and the last row is padding.
PREFILL = [
    *((0, 90 + i, 67 + i) for i in range(11)),
    *((1, 26 + i, 26 + i) for i in range(3)),
    *((2, 130 + i, 128) for i in range(2)),
]
PREFILL += [(3, 40, 0), (4, 200, 129), (4, 201, 130), (0, 0, 0)]
DECODE = [(0, 94, 71), (1, 28, 28), (2, 131, 128), (3, 40, 0), (4, 31, 1), (5, 200, 192)]


def empty_cache(num_blocks: int, block_size: int, head_dim: int, storage: torch.dtype) -> Tensor:
    """One layer of two, full of NaN in either format."""
    blocks = torch.full((num_blocks, 2, block_size, index_row_width(storage, head_dim)), 0xFF, dtype=torch.uint8)
    return (blocks if storage == torch.uint8 else blocks.to(storage).fill_(torch.nan))[:, 1]


def scores_case(
    tokens: list[tuple[int, int, int]], heads: int, head_dim: int, block_size: int, dtype: torch.dtype, fp8: bool
) -> list[Any]:
    """Arguments of `index_scores`; whatever must not be read is NaN or nowhere."""
    request, seq_lens, local_seq_lens = torch.tensor(tokens, dtype=torch.int32).unbind(1)
    local = [
        max((here for at, before, here in tokens if at == each and before > TOPK), default=0)
        for each in range(max(request) + 1)
    ]
    needed = [-(-here // block_size) for here in local]
    cache = empty_cache(sum(needed) + 1, block_size, head_dim, torch.uint8 if fp8 else dtype)
    ids = torch.randperm(len(cache), generator=torch.Generator().manual_seed(0))
    table = torch.full((len(local), max(needed) + 2), NOWHERE, dtype=torch.int32)
    for row, here in enumerate(local):
        mine, ids = ids.split([needed[row], len(ids) - needed[row]])
        table[row, : needed[row]] = mine
        index = torch.arange(here)
        slots = mine[index // block_size] * block_size + index % block_size
        write_index_keys(cache, randn(here, head_dim, dtype=dtype, seed=row), slots)
    q, weights = randn(len(tokens), heads, head_dim, dtype=dtype, seed=7), randn(len(tokens), heads, seed=8)
    if fp8:
        q, scales = index_to_fp8(q)
        weights *= scales
    return [q, weights, cache, table, request, seq_lens, local_seq_lens, TOPK]


def cases_of_scores(device: str) -> list[tuple[list[tuple[int, int, int]], int, int, int, torch.dtype, bool]]:
    """Return tokens, heads, widths, sizes of blocks, dtypes and whether keys are in fp8."""
    half = torch.float16  # the interpreter multiplies bfloat16's bits, as integers
    if device == "cpu":
        cases = [(PREFILL, 4, 32, 16, half, True), (PREFILL, 5, 24, 64, half, False), (DECODE, 32, 16, 128, half, True)]
        return [*cases, (DECODE, 16, 128, 48, half, False), (PREFILL[15:], 128, 64, 64, half, True)]
    sizes = (64, 128, 64), (32, 128, 64), (4, 32, 16), (5, 24, 48), (32, 16, 16), (128, 64, 128)
    many = [
        (each, before, before - each) for each in range(3) for before in range(1000 + 700 * each, 1200 + 700 * each)
    ]
    options = itertools.product((PREFILL, DECODE, many), sizes, (torch.bfloat16, half), (True, False))
    return [(tokens, *size, dtype, fp8) for tokens, size, dtype, fp8 in options]


def check_scores(device: str) -> None:
    """Compare with the torch code, and bits whatever else is scored: tokens of its request, of others, none."""
    for case in cases_of_scores(device):
        arguments = scores_case(*case)
        moved = on(device, arguments)
        arguments[3].masked_fill_(arguments[3] == NOWHERE, 0)  # the torch code looks at rows that are not scored
        # It works in float64, which takes a core of the host minutes.
        got = score_kernels.index_scores(IndexQueries(*moved)).cpu()
        wanted = scores.index_scores.reference(IndexQueries(*on(device, arguments))).cpu()
        request, seq_lens, local_seq_lens = arguments[4:7]
        is_scored = (torch.arange(got.shape[1]) < local_seq_lens[:, None]) & (seq_lens > TOPK)[:, None]
        assert got.shape == wanted.shape
        assert is_scored.any()
        # Tensor cores add up products of e4m3 in 14 bits: the sum of 64 heads shows it, by 0.0012 of the scores' size
        # at most.
        atol = 2e-3 if device == "cpu" else 4e-3 * float(wanted[is_scored].square().mean().sqrt())
        torch.testing.assert_close(got[is_scored], wanted[is_scored], atol=atol, rtol=2e-3)
        moved[3], moved[4] = moved[3][request.long()], torch.arange(len(request), dtype=torch.int32, device=device)
        # Each token is a request of its own: the form of decode.
        alone = score_kernels.index_scores(IndexQueries(*moved)).cpu()
        # The interpreter's products are NumPy's, whose last bits depend on their shape on some processors.
        tolerance = {"atol": 1e-4, "rtol": 1e-5} if device == "cpu" else {"atol": 0.0, "rtol": 0.0}
        torch.testing.assert_close(alone[is_scored], got[is_scored], **tolerance)


def check_projections(device: str) -> None:
    """Codes and scales of keys and queries; with a Hadamard transform values may round to a neighbour."""
    cases = [(5, 32, 8, 5, torch.float32), (2, 128, 64, 40, torch.float16)]
    if device == "cuda":
        sizes = (5, 32, 8, 5), (64, 128, 64, 1), (32, 128, 64, 100)
        cases = [(*size, dtype) for size in sizes for dtype in (torch.bfloat16, torch.float16)]
        cases.append((64, 128, 64, 33, torch.float32))
    for (heads, head_dim, rope, num_tokens, dtype), fp8, hadamard in itertools.product(
        cases, (True, False), (True, False)
    ):
        angles = randn(num_tokens, rope, seed=3)
        for cos_sin, interleaved in ((angles, False), (angles, True), (None, False)):
            keys, weights = cut(randn(num_tokens, head_dim + heads, dtype=dtype)).tensor_split((head_dim,), -1)
            keys[:1] = 0
            cache = empty_cache(7, 16, head_dim, torch.uint8 if fp8 else dtype)
            slots = (torch.arange(num_tokens) * 37 % 112).where(torch.arange(num_tokens) % 3 < 2, -1)
            bias = None if interleaved else randn(head_dim, dtype=dtype, seed=2)  # without one it is an RMSNorm
            norm = 0.5 + randn(head_dim, dtype=dtype, seed=1).abs(), bias
            rotation = IndexRotation(cos_sin, interleaved, hadamard)
            moved, there = on(device, [keys, cache, slots, *norm]), IndexRotation(*on(device, [*rotation]))
            projections.norm_rope_index_keys(keys, cache, slots, IndexNorm(*norm, 1e-2), rotation)
            kernels.norm_rope_index_keys(*moved[:3], IndexNorm(*moved[3:], 1e-2), there)
            assert_same_keys(moved[1].cpu(), cache)
            other_layer = moved[1]._base[:, 0].cpu()
            assert torch.equal(other_layer.view(torch.uint8), cache._base[:, 0].view(torch.uint8))

            weights = cut(weights.float()) if interleaved else weights  # an engine may compute them in float32
            query = [cut(randn(num_tokens, heads, head_dim, dtype=dtype, seed=4)), weights]
            q, factors = kernels.rope_index_queries(*on(device, query), there, fp8)
            wanted_q, wanted_factors = projections.rope_index_queries(*query, rotation, fp8)
            assert (q.dtype, q.shape, factors.dtype) == (FP8 if fp8 else dtype, wanted_q.shape, torch.float32)
            assert_near(q.cpu().float() * factors.cpu()[..., None], wanted_q.float() * wanted_factors[..., None])


def assert_same_keys(got: Tensor, wanted: Tensor) -> None:
    """Close where there are keys, untouched NaN where there are none."""
    parts = []
    for cache in (got, wanted):
        codes, scales = read_index_keys(cache, torch.arange(len(cache)))
        parts.append(codes.float() if scales is None else codes.float() * scales[..., None])
    assert_near(*parts)


def assert_near(got: Tensor, wanted: Tensor) -> None:
    """All but a few equal, and those no further off than a step of e4m3 or bfloat16."""
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=0.13, equal_nan=True)
    assert (got - wanted).nan_to_num().abs().gt(1e-2 * wanted.abs().nan_to_num() + 1e-3).float().mean() < 0.01


@on_both
@pytest.mark.parametrize("check", [check_projections, check_scores])
def test_kernels(check: Callable[[str], None], device: str) -> None:
    run_kernels(device, check)


@pytest.mark.gpu
def test_offsets_past_2_to_the_31() -> None:
    num_blocks = 2**31 // (64 * 132) + 2
    cache = torch.empty(num_blocks, 64, 132, dtype=torch.uint8, device="cuda")
    q, weights, small, *_ = on("cuda", scores_case(DECODE[:1], 64, 128, 64, torch.bfloat16, True))
    slots = torch.tensor([num_blocks * 64 - 64 + i for i in range(64)], device="cuda")
    keys = randn(64, 128, dtype=torch.bfloat16).cuda()
    norm = torch.ones(128, dtype=torch.bfloat16, device="cuda"), torch.zeros(128, dtype=torch.bfloat16, device="cuda")
    small = small[:1].contiguous()
    options = IndexNorm(*norm), IndexRotation(None, False, False)
    projections.norm_rope_index_keys(keys, cache, slots, *options)
    projections.norm_rope_index_keys(keys, small, slots % 64, *options)
    assert torch.equal(cache[-1], small[0])
    lens = (
        torch.tensor([0], dtype=torch.int32, device="cuda"),
        *torch.tensor([[100], [64]], dtype=torch.int32, device="cuda"),
    )
    far, near = torch.tensor([[[num_blocks - 1]], [[0]]], dtype=torch.int32, device="cuda")
    assert torch.equal(
        scores.index_scores(IndexQueries(q, weights, cache, far, *lens, TOPK)),
        scores.index_scores(IndexQueries(q, weights, small, near, *lens, TOPK)),
    )


POINTERS = {
    **dict.fromkeys(("weights_ptr", "out_ptr"), "*fp32"),
    **dict.fromkeys(("table_ptr", "request_ptr", "seq_lens_ptr", "local_seq_lens_ptr"), "*i32"),
}


@pytest.mark.parametrize(("dtype", "tokens"), [("fp8e4nv", 1), ("bf16", 2)])
def test_scores_compile_for_hopper(dtype: str, tokens: int) -> None:
    """Products are wgmma's, with keys on their way while others are multiplied, 16 bytes a thread."""
    is_fp8 = dtype == "fp8e4nv"
    sizes = {"NUM_HEADS": 64, "HEAD_DIM": 128, "COLUMNS": 128, "BLOCK_SIZE": 64, "TILES": 32, "TOKENS": tokens}
    sizes["HEADS"] = 64
    ptx = ptx_for_hopper(score_kernels.scores_kernel, dtype, sizes, **POINTERS)
    assert f"wgmma.mma_async.sync.aligned.m64n{64 * tokens}k{32 if is_fp8 else 16}" in ptx
    assert "cp.async.cg.shared.global" in ptx
    assert ("cp.async.ca.shared.global" in ptx) == is_fp8  # scales of keys


def test_projections_compile_for_hopper() -> None:
    sizes = {"WIDTH": 128, "COLUMNS": 128, "ROPE": 64, "ROWS": 16, "INTERLEAVED": True, "HADAMARD": True}
    types = {"slots_ptr": "*i64", "cos_sin_ptr": "*fp32", "eps": "fp32", "factor": "fp32", "factors_ptr": "*fp32"}
    for kernel, more, formats in (
        (kernels.keys_kernel, {"BLOCK_SIZE": 64}, {"cache_ptr": "*u8"}),
        (kernels.keys_kernel, {"BLOCK_SIZE": 64, "bias_ptr": None}, {"cache_ptr": "*u8"}),
        (kernels.queries_kernel, {"NUM_HEADS": 64}, {"out_ptr": "*fp8e4nv"}),
        (kernels.queries_kernel, {"NUM_HEADS": 64}, {"out_ptr": "*fp8e4nv", "weights_ptr": "*fp32"}),
    ):
        ptx = ptx_for_hopper(kernel, "bf16", {**sizes, **more}, **types, **formats)
        assert "st.global.v4.b32" in ptx
        assert "tf32" not in ptx
