"""The kernels of attention in a fixed order: bits on a GPU; against the reference in Triton's interpreter."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dcpmla.attention.backends.calls import DecodeCall, Segments
from dcpmla.attention.backends.choice import DECODE_BACKENDS
from dcpmla.attention.mla import deterministic
from dcpmla.attention.mla.decode import run_call
from dcpmla.attention.mla.deterministic import DeterministicResults
from dcpmla.attention.step.chunks import PrefillMetadata, lay_out_prefills
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.triton import deterministic_decode, deterministic_merge, deterministic_prefill
from tests.support.kernels import run_kernels
from tests.support.ordered import (
    Batch,
    Sizes,
    alone,
    decode,
    decode_call,
    in_float32,
    layout,
    prefill,
    queries,
    share_caches,
)
from tests.support.row_errors import largest_error

SMALL = Sizes(dtype=torch.float16)
V3 = Sizes(128, 512, 64, 128, 128, torch.bfloat16, device="cuda")
FORMATS = ("auto", "fp8", "fp8_ds_mla")
BATCH: Batch = [(1, 700, 1), (2, 64, 1), (3, 1, 1), (4, 130, 1)]
SEGMENTS: Batch = [(1, 70, 3), (2, 700, 4)]


def check_decode(_: str) -> None:
    deterministic_merge.SPLIT.value = 1  # several splits of few tiles
    for size, batch, max_query_len in ((1, BATCH, 1), (2, SEGMENTS, 2), (8, BATCH, 1)):
        expected = decode(SMALL, size, batch, max_query_len)
        for num_rows in (1 << 16, 1):  # rows for each split, and for all of a class
            with (
                patch.object(deterministic_merge, "DETERMINISTIC_ROWS", num_rows),
                patch.object(deterministic_merge, "SPLIT_TILES", 1),
            ):
                got = decode(SMALL, size, batch, max_query_len, run=deterministic_decode.run)
            for actual, other in zip(itertools.chain(*got), itertools.chain(*expected), strict=True):
                torch.testing.assert_close(actual, other, atol=2e-2, rtol=2e-2)
            if num_rows > 1:
                first = got
        assert all(map(torch.equal, itertools.chain(*got), itertools.chain(*first)))


def check_prefill(_: str) -> None:
    cases: tuple[tuple[int, Batch, int], ...] = (
        (1, [(1, 300, 40), (2, 20, 20), (1, 180, 130)], 1 << 16),
        (2, [(1, 300, 40), (2, 20, 20), (1, 180, 130)], 128),
        (1, [(1, 300, 1)], 256),
    )
    expected = [prefill(SMALL, *case) for case in cases]
    with patch.object(deterministic, "attend_to_chunk", deterministic_prefill.run):
        got = [prefill(SMALL, *case) for case in cases]
    for actual, other in zip(itertools.chain(*got), itertools.chain(*expected), strict=True):
        assert largest_error(actual, other) <= 2**-8
    assert all(map(torch.equal, got[0], got[1]))
    assert torch.equal(got[2][0], got[0][0][-1:])


def check_prompts_among_others(sizes: Sizes) -> None:
    """Check prompts after decodes and before padding, as a graph has them: their rows are as without the others."""
    lens, num_tokens = [3, 170, 1], 460
    widths = sizes.nope + sizes.rope, sizes.num_heads * (sizes.nope + sizes.value), sizes.rope
    q, kv, k_pe = (
        sizes.rows(seed, num_tokens, width) for seed, width in enumerate((widths[0] * sizes.num_heads, *widths[1:]))
    )
    q = q.unflatten(1, (sizes.num_heads, -1))
    steps = StepBuilder(layout(1, sizes), 0, sizes.device)
    table = torch.zeros(len(lens), 3, dtype=torch.int32, device=sizes.device)
    packed = lay_out_prefills(steps.layout, lens, lens, table)
    assert not packed.context_chunks

    def attend(rows: slice, prefill: PrefillMetadata) -> Tensor:
        out = torch.full((num_tokens, sizes.num_heads, sizes.value), 7.0, dtype=sizes.dtype, device=sizes.device)[rows]
        heads = kv[rows].unflatten(-1, (sizes.num_heads, -1)).split([sizes.nope, sizes.value], -1)
        DeterministicResults(q[rows], prefill, sizes.softmax_scale, out).attend_to_own(*heads, k_pe[rows])
        return out

    for first in (0, 1, 127, 128, 259):
        rows = slice(first, first + sum(lens))
        starts = torch.tensor([first, first + 3, first + 173] + [first + 174] * 4, dtype=torch.int32)
        prefill = PrefillMetadata(Segments((), starts.to(sizes.device)), packed.first_position.new_zeros(6), ())
        out = attend(slice(None), prefill)
        assert torch.equal(out[rows], attend(rows, packed))
        assert (out[: rows.start] == 7).all()
        assert (out[rows.stop :] == 7).all()


def test_prompts_among_others() -> None:
    check_prompts_among_others(Sizes())


def check_prompts_with_the_kernel(_: str) -> None:
    with patch.object(deterministic, "attend_to_chunk", deterministic_prefill.run):
        check_prompts_among_others(SMALL)


@pytest.mark.parametrize("check", [check_decode, check_prefill, check_prompts_with_the_kernel])
def test_in_the_interpreter(check: Callable[[str], None]) -> None:
    run_kernels("cpu", check)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernels")
def test_prompts_among_others_on_a_gpu() -> None:
    check_prompts_among_others(replace(V3, num_heads=4))


_PER_TOKEN = ("q", "q_pe", "block_table", "seq_lens")
MANY: Batch = [(seed, 1 + 613 * seed % 3000, 1) for seed in range(40)]


@pytest.fixture(params=["best", "portable"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the best kernels of this GPU, or those for all GPUs."""
    if request.param == "best":
        yield
        return
    backends = [each for each in DECODE_BACKENDS if each.name != "hopper"]
    with (
        patch("dcpmla.attention.mla.decode.DECODE_BACKENDS", backends),
        patch("dcpmla.attention.mla.deterministic.hopper_widths", lambda *_: "a test of the portable kernel"),
    ):
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.usefixtures("kernels")
def test_decode_on_a_gpu(cache_format: str) -> None:
    for num_heads in (16, 128):
        sizes = replace(V3, num_heads=num_heads, cache_format=cache_format)
        expected = decode(sizes, 1, MANY)
        for size in (2, 4, 8):
            assert all(map(torch.equal, itertools.chain(*decode(sizes, size, MANY)), itertools.chain(*expected)))
        for index in (0, 1, 7, 39):
            (single,) = decode(sizes, 2, MANY[index : index + 1])
            assert all(map(torch.equal, single, expected[index]))
        batch: Batch = [(7, 20_000, 5), *MANY]  # several splits
        got = decode(sizes, 1, batch, 2)
        assert all(map(torch.equal, itertools.chain(*got[1:]), itertools.chain(*expected)))
        tokens = [decode(sizes, 8, each)[0] for each in alone(batch[:1])]
        assert torch.equal(torch.cat([out for out, _ in tokens]), got[0][0])
        with patch(
            "dcpmla.attention.triton.deterministic_merge.DETERMINISTIC_ROWS", 1
        ):  # all splits of a class in the same rows
            shared = decode(sizes, 1, batch, 2)
        assert all(map(torch.equal, itertools.chain(*shared), itertools.chain(*got)))
    with patch("dcpmla.attention.mla.decode.DECODE_BACKENDS", DECODE_BACKENDS[-1:]):
        reference = decode(sizes, 1, MANY[:8])
    for actual, other in zip(expected[:8], reference, strict=True):
        # Kernels round weights of keys, and keys of fp8_ds_mla, to bfloat16. That costs up to 0.4 % of a row's norm and
        # 0.004 of an lse; a tile of keys that is left out costs at least 4.7 % and 0.016.
        assert largest_error(actual[0], other[0]) <= 2**-7
        torch.testing.assert_close(actual[1], other[1], atol=2**-7, rtol=0)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernels")
def test_decode_in_graphs_of_growing_lengths() -> None:
    def run(call: DecodeCall) -> tuple[Tensor, Tensor]:
        return run_call(call, None)

    lens, q = [1, 63, 9000, 300], queries(V3, [(seed, 20_000, 1) for seed in range(4)], 576)
    (cache, step), *_ = share_caches(V3, layout(1, V3), [(seed, 20_000, 1) for seed in range(4)], 4)
    assert step.decode is not None
    call = decode_call(V3, 1, q, cache, step.decode)
    run(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(call)
    for added in (0, 700, 10_000):
        call.seq_lens.copy_(torch.tensor([length + added for length in lens]))
        graph.replay()
        for request in range(4):
            row = slice(request, request + 1)
            own = run(call._replace(**{name: getattr(call, name)[row] for name in _PER_TOKEN}))
            assert torch.equal(out[request], own[0][0])
            assert torch.equal(lse[request], own[1][0])


@pytest.mark.gpu
@pytest.mark.usefixtures("kernels")
def test_prefill_on_a_gpu() -> None:
    for cache_format in FORMATS:
        sizes = replace(V3, num_heads=4, cache_format=cache_format)
        prompt = 1500
        expected = prefill(sizes, 1, [(3, prompt, prompt)])[0]
        for size, piece, workspace in ((1, 300, 128), (2, 7, 256), (8, 64, 512), (1, 1, 1 << 16), (4, prompt, 512)):
            starts = [*range(0, prompt, piece)]
            for start in starts[:3] + starts[-3:]:
                end = min(prompt, start + piece)
                got = prefill(sizes, size, [(1, 40, 40), (3, end, end - start), (2, 900, 30)], workspace)[1]
                assert torch.equal(got, expected[start:end]), (size, piece, start)
        reference = prefill(in_float32(sizes), 1, [(3, prompt, 20)])[0]
        # Rounding to bfloat16 costs 0.4 % of a row's norm; a tile of keys that is left out costs 12 % or more.
        assert largest_error(expected[-20:].cpu(), reference) <= 2**-7
