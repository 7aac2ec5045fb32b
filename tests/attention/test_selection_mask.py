"""The mask of selected positions, and prefill over them, the whole path: against float64 over the selection."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla.attention.backends import obstacles
from dcpmla.attention.backends.choice import PREFILL_BACKENDS
from dcpmla.attention.backends.mask import selection_mask, unpack_mask
from dcpmla.attention.triton import mask as kernels
from tests.support.backends import prefill_call
from tests.support.hopper import ptx_for_hopper
from tests.support.kernels import on_both, run_kernels
from tests.support.layouts import dcp_config
from tests.support.prefill_checks import segments
from tests.support.sharded_context import ShardedContext


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


@given(
    # Tokens, first position.
    segment=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 80)), min_size=1, max_size=4),
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
    expected = [
        [begin + key in row and key < num_keys for key in range(32 * words.shape[1])]
        for row, begin in zip(positions.tolist(), first_of_token, strict=True)
    ]
    assert [[bool(word >> bit & 1) for word in row for bit in range(32)] for row in words.tolist()] == expected
    assert unpack_mask(words, num_keys).tolist() == [row[:num_keys] for row in expected]


def check_mask_kernel(device: str) -> None:
    """Against the specification: rows of a wider tensor, top-k that is no power of 2, -1 everywhere, many requests."""
    for query_lens, first, topk, num_keys in (
        ([3, 1, 9], [100, 0, 31], 40, 130),
        ([1] * 17, list(range(17)), 64, 32),
        ([2], [5], 100, 1),
    ):
        positions = select(seq_lens_of_tokens(query_lens, [begin + 60 for begin in first]), topk)
        positions[0] = -1
        wide = torch.cat([positions, torch.arange(len(positions) * 3, dtype=torch.int32).view(-1, 3)], 1)
        start_loc, first_position = segments(query_lens, "cpu").start_loc, torch.tensor(first, dtype=torch.int32)
        expected = selection_mask(positions, start_loc, first_position, num_keys)
        got = kernels.selection_mask(
            wide.to(device)[:, :topk], start_loc.to(device), first_position.to(device), num_keys
        )
        assert torch.equal(got.cpu(), expected)
        assert expected.count_nonzero()


@on_both
def test_the_kernel(device: str) -> None:
    run_kernels(device, check_mask_kernel)


def test_mask_kernel_compiles_for_hopper() -> None:
    ptx_for_hopper(kernels.selection_mask_kernel, "i32", {"TOPK": 2048, "BLOCK": 2048})


@on_both
def test_operator(device: str) -> None:
    """Check schema and the shapes of tracing: `torch.library.opcheck`."""
    start_loc, first = segments([3, 1], device).start_loc, torch.tensor([7, 0], dtype=torch.int32, device=device)
    torch.library.opcheck(selection_mask.op, (select([8, 9, 10, 4], 5).to(device), start_loc, first, 40))


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


@pytest.mark.parametrize(("size", "interleave", "block_size"), [(1, 1, 4), (2, 1, 4), (3, 2, 4), (4, 4, 4), (8, 1, 4)])
def test_prefill_over_selected_positions(size: int, interleave: int, block_size: int) -> None:
    """Context in several chunks, of other lengths, or none; tokens that select all they have, one position, none of a
    segment; then all tokens without a selection.
    """
    query_lens, context_lens, topk = [5, 3, 34], [137, 0, 2], 9
    seq_lens = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
    dcp = dcp_config(size, size, interleave, block_size=block_size)
    workspace = -(-44 // dcp.chunk_alignment) * dcp.chunk_alignment  # shared by two requests
    positions = select(seq_lens_of_tokens(query_lens, seq_lens), topk)
    positions[0], positions[1] = torch.arange(topk) * 15, -1  # context alone, in all chunks; one position of it
    positions[1, topk // 2] = 70
    positions[2] = torch.tensor([139, 137, 138] + [-1] * (topk - 3))  # new tokens alone
    context = ShardedContext(replace(dcp, context_workspace_tokens=workspace), query_lens, context_lens)
    for selected in (positions, None):
        context.check(min_chunks=3, positions=selected)
    with pytest.raises(ValueError, match="selected_positions has 43 rows; expected one for each of the 42 tokens of q"):
        context.check(positions=torch.cat([positions, positions[:1]]))
