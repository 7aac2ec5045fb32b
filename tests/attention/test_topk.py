"""The selection's two operators: the torch code against sorting in Python, the Triton kernels against the torch code.

Kernels run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dcpmla import ownership
from dcpmla.attention.sparse import topk as spec
from dcpmla.attention.sparse.candidates import EMPTY, candidate_width, unpack_positions
from dcpmla.attention.sparse.slots import SlotLayout
from dcpmla.attention.sparse.step import SelectedTokens
from tests.support.shared_memory import run_interpreted

SCORES = [0.0, -0.0, 1.0, -1.0, 1e-42, -1e-42, 3e38, math.inf, -math.inf, math.nan, 0.5]


def sorted_positions(scores: list[float], topk: int) -> set[int]:
    """Select for one token, by the words of the specification."""
    if len(scores) <= topk:
        return set(range(len(scores)))
    known = [-math.inf if math.isnan(score) else score for score in scores]
    return set(sorted(range(len(scores)), key=lambda position: (-known[position], position))[:topk])


def shard(
    scores: Tensor, seq_lens: Tensor, rank: int, size: int, interleave: int, num_columns: int
) -> tuple[Tensor, Tensor]:
    """Return a rank's scores [T, num_columns], NaN after each row's last, and how many of each row it has."""
    local = torch.full((len(scores), num_columns), torch.nan)
    position = torch.arange(scores.shape[1])
    mine = position[ownership.owner_rank(position, size, interleave) == rank]
    local[:, : len(mine)] = scores[:, mine]
    local_seq_lens = ownership.local_seq_lens(seq_lens, size, rank, interleave)
    local[torch.arange(num_columns) >= local_seq_lens[:, None]] = torch.nan
    return local, local_seq_lens


def owned(selection: SelectedTokens, row: int) -> list[int]:
    return selection.slots[row, : int(selection.num_slots[row])].tolist()


layouts = st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 4]))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.sampled_from(SCORES), max_size=40), min_size=1, max_size=3), st.integers(1, 12), layouts)
def test_every_layout_selects_what_sorting_does(rows: list[list[float]], topk: int, layout: tuple[int, int]) -> None:
    """Whatever the ranks, each selected token is in the slots of one of them, its owner, and nothing else is."""
    (size, interleave), block_size = layout, 4
    seq_lens = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    scores = torch.zeros(len(rows), 40)
    for row, known in zip(scores, rows, strict=True):
        row[: len(known)] = torch.tensor(known)
    blocks = torch.randperm(len(rows) * 10, generator=torch.Generator().manual_seed(1)).view(len(rows), 10).int()
    shards = [shard(scores, seq_lens, rank, size, interleave, 40) for rank in range(size)]
    parts = [
        spec.local_candidates(local, seq_lens, lens, topk, rank, size, interleave)
        for rank, (local, lens) in enumerate(shards)
    ]
    for part in parts:
        for positions in unpack_positions(part).tolist():
            known = [position for position in positions if position >= 0]
            assert positions == sorted(known) + [-1] * (len(positions) - len(known))
    selections = []
    for rank in range(size):
        selections.append(SelectedTokens.empty(len(rows), topk, "cpu"))
        chosen = selections[rank].positions, selections[rank].slots, selections[rank].num_slots
        request = torch.arange(len(rows), dtype=torch.int32)
        table = SlotLayout(blocks, request, block_size, rank, size, interleave)
        spec.choose_tokens(torch.cat(parts, 1), table, None, *chosen)
    for row, known in enumerate(rows):
        wanted = sorted_positions(known, topk)
        for rank, selection in enumerate(selections):
            num_selected = len(wanted)
            assert set(selection.positions[row, :num_selected].tolist()) == wanted
            assert set(selection.positions[row, num_selected:].tolist()) <= {-1}
            mine = [position for position in wanted if ownership.owner_rank(position, size, interleave) == rank]
            slots = (
                ownership.slot_mapping(torch.tensor(sorted(mine)), blocks[row], block_size, size, rank, interleave)
                if mine
                else None
            )
            assert sorted(owned(selection, row)) == ([] if slots is None else sorted(slots.tolist()))


def adversarial(num_rows: int, num_columns: int, device: str) -> Iterator[Tensor]:
    """Scores that are hard to part: where guesses between them mislead, and where only positions do."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (num_rows, num_columns)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def uniform() -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    column = torch.arange(num_columns, device=device).float().expand(shape)
    yield normal()
    yield torch.zeros(shape, device=device)
    yield torch.full(shape, torch.nan, device=device)
    yield (uniform() < 0.5).float()
    yield column - 7
    yield -column
    yield 10.0 ** (76 * uniform() - 38) * normal().sign()
    yield (column + 1) * 1e-45 * normal().sign()  # denormals
    yield torch.exp2(-column)  # most of them underflow
    yield torch.where(column == num_columns // 3, 1e38, normal())
    yield normal().relu() - (uniform() < 0.2) * 0.0
    yield torch.where(uniform() < 0.05, 50 + normal(), 1e-3 * normal())
    yield (
        normal()
        .masked_fill(uniform() < 0.4, torch.nan)
        .masked_fill(uniform() < 0.3, torch.inf)
        .masked_fill(uniform() < 0.3, -torch.inf)
    )
    yield torch.where(uniform() < 0.5, -0.0, 0.0)


def check(scores: Tensor, seq_lens: Tensor, topk: int, size: int, interleave: int, block_size: int = 8) -> None:
    """Both kernels do what the torch code does, on one rank of several and with candidates of all of them."""
    from dcpmla.attention.sparse.kernels import topk as kernels

    device, (num_tokens, num_columns), rank = scores.device, scores.shape, size - 1
    seq_lens = seq_lens.to(device)
    local_seq_lens = ownership.local_seq_lens(seq_lens, size, rank, interleave)
    scores = scores.masked_fill(torch.arange(num_columns, device=device) >= local_seq_lens[:, None], torch.nan)
    arguments = scores, seq_lens, local_seq_lens, topk, rank, size, interleave
    wanted = spec.local_candidates(*(x.cpu() if isinstance(x, Tensor) else x for x in arguments))
    got = kernels.local_candidates(*arguments)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    assert torch.equal(got.cpu(), wanted)
    others = [
        spec.local_candidates(scores.roll(1 + each, 1).cpu(), seq_lens.cpu(), lens.cpu(), topk, each, size, interleave)
        for each, lens in enumerate(ownership.local_seq_lens(seq_lens, size, None, interleave).unbind(-1)[:-1])
    ]
    candidates = torch.cat([wanted, *others], 1)
    blocks = torch.arange(3 * -(-num_columns // block_size), dtype=torch.int32).flip(0).view(3, -1)
    request = torch.arange(num_tokens, dtype=torch.int32) % 3
    selections = []
    by: tuple[tuple[Any, Any], ...] = ((spec.choose_tokens, "cpu"), (kernels.choose_tokens, device))
    for choose, place in by:
        # Some tokens have slots already, which stay in front of those that are selected.
        num_first = None if interleave == 1 else torch.arange(num_tokens, dtype=torch.int32, device=place) % 3
        slots = torch.empty(num_tokens, topk + 2, dtype=torch.int32, device=place)
        selection = dataclasses.replace(SelectedTokens.empty(num_tokens, topk, place), slots=slots, num_first=num_first)
        for memory in (selection.positions, selection.slots, selection.num_slots):
            memory.fill_(-7)
        layout = SlotLayout(blocks.to(place), request.to(place), block_size, rank, size, interleave)
        chosen = selection.positions, selection.slots, selection.num_slots
        choose(candidates.to(place), layout, num_first, *chosen)
        selections.append(selection)
    mine, theirs = selections
    assert torch.equal(mine.positions.sort(1).values, theirs.positions.cpu().sort(1).values)
    for row, num_selected in enumerate((mine.positions >= 0).sum(1).tolist()):
        assert (theirs.positions[row, num_selected:] == -1).all()
        assert sorted(owned(mine, row)) == sorted(owned(theirs, row))
    assert torch.equal(mine.num_slots, theirs.num_slots.cpu())


def check_garbage(device: str, num_candidates: int, topk: int) -> None:
    """After an exchange that failed, candidates are anything: nothing is written beyond a row, nor a slot that is in no
    block.
    """
    from dcpmla.attention.sparse.kernels import topk as kernels

    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**63), 2**63 - 1, (num_candidates,), generator=generator)
    rows = [
        words,
        words % 3,
        words % 40 - 20,
        words >> 31 << 31,
        words & 0xFF,
        torch.full_like(words, -1),
        torch.full_like(words, 7),
    ]
    candidates = torch.stack(rows).to(device)
    blocks = torch.arange(2, 14, dtype=torch.int32, device=device).view(1, 12)
    request = torch.zeros(len(rows), dtype=torch.int32, device=device)
    memory = torch.full((3, len(rows) + 2, topk), -7, dtype=torch.int32, device=device)
    positions, slots, num_slots = memory[:, 1:-1]
    layout = SlotLayout(blocks, request, 8, 0, 2, 1)
    kernels.choose_tokens(candidates, layout, None, positions, slots, num_slots[:, 0].contiguous())
    assert (memory[:2, [0, -1]] == -7).all()
    assert (positions >= -1).all()
    assert ((slots == -7) | ((slots >= 2 * 8) & (slots < 14 * 8))).all()


def check_in_the_interpreter() -> None:
    """Tiles of few keys: several of them for a row, and candidates that are cut twice; two warps, and several loads of
    each.
    """
    import triton.language as tl

    from dcpmla.attention.sparse.kernels import compaction, threshold
    from dcpmla.attention.sparse.kernels import topk as kernels

    def no_less(numbers: Any, bound: Any) -> Any:
        return (numbers >= bound).to(tl.float32)

    def scatter(out_ptr: Any, indices: Any, values: Any, keys: Any, bound: Any) -> None:
        tl.store(out_ptr + indices, values, mask=keys >= bound)

    threshold.no_less, compaction.scatter = no_less, scatter  # there is no inline assembler
    kernels.TILE, kernels.WARPS = 512, 2
    layouts = itertools.cycle([(1, 1, 9), (2, 4, 70), (3, 2, 200), (1, 4, 3)])
    every_other = itertools.islice(adversarial(1, 700, "cpu"), 0, None, 2)  # rounds are slow here; GPUs have them all
    for scores, (size, interleave, topk) in zip(every_other, layouts, strict=False):
        check(scores, torch.tensor([700 * size - topk]), topk, size, interleave)
    few = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    check(few, torch.tensor([0, 1, 5, 6, 12], dtype=torch.int32), 5, 2, 1)
    check(few[:0], torch.tensor([], dtype=torch.int32), 5, 2, 1)
    check_garbage("cpu", 700, 60)


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted(1, check_in_the_interpreter)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_columns", "topk", "size"), [(16384, 2048, 8), (131072, 2048, 1), (5003, 512, 3), (300_000, 700, 2)]
)
def test_kernels(num_columns: int, topk: int, size: int) -> None:
    for scores in adversarial(4, num_columns, "cuda"):
        whole = num_columns * size
        check(
            scores, torch.tensor([whole, whole // 3, topk + 1, topk], dtype=torch.int32), topk, size, 1, block_size=64
        )


@pytest.mark.gpu
def test_candidates_may_be_anything() -> None:
    for num_candidates in (2500, 16384, 40_000):
        check_garbage("cuda", num_candidates, 2048)


@pytest.mark.gpu
def test_results_are_the_same_each_time() -> None:
    scores = torch.randn(64, 100_000, device="cuda").round(decimals=2)
    seq_lens = torch.full((64,), 100_000, dtype=torch.int32, device="cuda")
    first, *others = (spec.local_candidates(scores, seq_lens, seq_lens, 2048, 0, 1, 1) for _ in range(5))
    assert all(torch.equal(first, other) for other in others)


TYPES = {
    **{"scores_ptr": "*fp32", "out_ptr": "*i64", "candidates_ptr": "*i64"},
    **dict.fromkeys(("seq_lens_ptr", "local_seq_lens_ptr", "block_table_ptr", "request_ptr"), "*i32"),
    **dict.fromkeys(("num_first_ptr", "positions_ptr", "slots_ptr", "num_slots_ptr"), "*i32"),
}
RANK = {"DCP_RANK": 1, "DCP_SIZE": 8, "INTERLEAVE": 1}


@given(topk=st.integers(1, 3000), num_columns=st.integers(1, 5000))
def test_candidates_are_enough_and_of_few_widths(topk: int, num_columns: int) -> None:
    width = candidate_width(topk, num_columns)
    assert min(topk, num_columns) <= width <= topk
    assert len({candidate_width(topk, number) for number in range(1, 5000, 7)}) <= 16


@pytest.mark.parametrize(
    ("name", "width", "constants"),
    [
        ("local_kernel", 4, {"topk": 512, "width": 512, "VECTOR": 4, **RANK}),
        ("cut_kernel", 2, {"width": 512}),
        ("choose_kernel", 2, {"topk": 512, "BLOCK_SIZE": 64, "SELECTED": 512, **RANK}),
    ],
)
def test_kernels_compile_for_hopper(name: str, width: int, constants: dict[str, Any]) -> None:
    """Keys are loaded 16 bytes a thread, and are stored from where they are: shared memory is for what sums and scans
    leave in it.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dcpmla.attention.sparse.kernels import topk as kernels

    tile, num_warps = 4096, 4
    kernel, constants = getattr(kernels, name), {"TILE": tile, "WARPS": num_warps, **constants}
    aligned = re.compile(r".*_ptr|scores_stride|candidates_stride|stride|num_candidates")
    attributes = {
        (at,): [["tt.divisibility", 16]] for at, each in enumerate(kernel.arg_names) if aligned.fullmatch(each)
    }
    signature = {each: "constexpr" if each in constants else TYPES.get(each, "i32") for each in kernel.arg_names}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    loads = re.findall(r"ld\.global\.v4\.b32" if width == 4 else r"ld\.global\.v2\.b64", compiled.asm["ptx"])
    assert len(loads) >= tile // (width * 32 * num_warps)
    assert compiled.metadata.shared <= tile


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_operators(device: str) -> None:
    """Schema, and the shapes that tracing is told."""
    lens = torch.tensor([0, 9, 3], dtype=torch.int32, device=device)
    candidates = torch.full((3, 12), EMPTY, device=device)
    selection = SelectedTokens.empty(3, 5, device)
    blocks, request = torch.arange(9, dtype=torch.int32, device=device).view(3, 3), lens.new_tensor([2, 0, 2])
    torch.library.opcheck(spec.local_candidates.op, (torch.randn(3, 12, device=device), lens, lens, 5, 0, 1, 1))
    chosen = selection.positions, selection.slots, selection.num_slots
    torch.library.opcheck(spec.choose_tokens.op, (candidates, blocks, request, 4, 0, 1, 1, None, *chosen))
