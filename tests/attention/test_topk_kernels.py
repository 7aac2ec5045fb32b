"""The selection's two operators: the Triton kernels against the torch code.

Kernels run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from dcpmla.attention.select import topk as spec
from dcpmla.attention.select.candidates import EMPTY
from dcpmla.attention.select.kernels import compaction, threshold
from dcpmla.attention.select.kernels import topk as kernels
from dcpmla.attention.select.slots import SlotLayout
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.ownership import Owner
from tests.attention.test_topk import owned
from tests.support.hopper import compile_source, new_source
from tests.support.kernels import on_both
from tests.support.shared_memory import run_interpreted


def adversarial(num_rows: int, num_columns: int, device: str) -> Iterator[Tensor]:
    """Yield scores that are hard to part, by guesses between them or by positions alone."""
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
    yield torch.exp2(-column)  # many underflow
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
    """Compare both kernels with the torch code, on one rank of several and with candidates of all ranks."""
    device, (num_tokens, num_columns), rank = scores.device, scores.shape, size - 1
    seq_lens = seq_lens.to(device)
    owner = Owner(rank, size, interleave)
    local_seq_lens = owner.local_seq_lens(seq_lens)
    scores = scores.masked_fill(torch.arange(num_columns, device=device) >= local_seq_lens[:, None], torch.nan)
    arguments = scores, seq_lens, local_seq_lens, topk, owner
    expected = spec.local_candidates(*(x.cpu() if isinstance(x, Tensor) else x for x in arguments))
    got = kernels.local_candidates(*arguments)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(got.cpu(), expected)
    others = [
        spec.local_candidates(
            scores.roll(1 + each.rank, 1).cpu(), seq_lens.cpu(), each.local_seq_lens(seq_lens.cpu()), topk, each
        )
        for each in (Owner(other, size, interleave) for other in range(rank))
    ]
    candidates = torch.cat([expected, *others], 1)
    blocks = torch.arange(3 * -(-num_columns // block_size), dtype=torch.int32).flip(0).view(3, -1)
    request = torch.arange(num_tokens, dtype=torch.int32) % 3
    selections = []
    by: tuple[tuple[Any, Any], ...] = ((spec.choose_tokens, "cpu"), (kernels.choose_tokens, device))
    for choose, place in by:
        # Some tokens have slots already, which stay before the selected ones.
        num_first = None if interleave == 1 else torch.arange(num_tokens, dtype=torch.int32, device=place) % 3
        slots = torch.empty(num_tokens, topk + 2, dtype=torch.int32, device=place)
        selection = SelectedTokens.empty(num_tokens, topk, place)._replace(slots=slots, num_first=num_first)
        for memory in (selection.positions, selection.slots, selection.num_slots):
            memory.fill_(-7)
        layout = SlotLayout(blocks.to(place), request.to(place), block_size, owner)
        choose(candidates.to(place), layout, selection)
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
    layout = SlotLayout(blocks, request, 8, Owner(0, 2, 1))
    kernels.choose_tokens(candidates, layout, SelectedTokens(positions, slots, num_slots[:, 0].contiguous()))
    assert (memory[:2, [0, -1]] == -7).all()
    assert (positions >= -1).all()
    assert ((slots == -7) | ((slots >= 2 * 8) & (slots < 14 * 8))).all()


def check_in_the_interpreter(numbers: tuple[int, ...]) -> None:
    """Check scores of `adversarial` by their numbers. Tiles have few keys: several of them for a row, and candidates
    that are cut twice; two warps, and several loads of each.
    """

    def no_less(numbers: Any, bound: Any) -> Any:
        return (numbers >= bound).to(tl.float32)

    def scatter(out_ptr: Any, indices: Any, values: Any, keys: Any, bound: Any) -> None:
        tl.store(out_ptr + indices, values, mask=keys >= bound)

    threshold.no_less, compaction.scatter = no_less, scatter  # there is no inline assembler
    kernels.TILE, kernels.WARPS = 512, 2
    layouts = itertools.cycle([(1, 1, 9), (2, 4, 70), (3, 2, 200), (1, 4, 3)])
    hard = list(adversarial(1, 700, "cpu"))
    for number, (size, interleave, topk) in zip(numbers, layouts, strict=False):
        scores = hard[number]
        check(scores, torch.tensor([700 * size - topk]), topk, size, interleave)
    few = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    check(few, torch.tensor([0, 1, 5, 6, 12], dtype=torch.int32), 5, 2, 1)
    check(few[:0], torch.tensor([], dtype=torch.int32), 5, 2, 1)
    check_garbage("cpu", 700, 60)


@pytest.mark.parametrize("numbers", [(2, 6, 10, 12), pytest.param((0, 4, 8), marks=pytest.mark.thorough)])
def test_kernels_in_the_interpreter(numbers: tuple[int, ...]) -> None:
    """Rounds are slow here; GPUs have all scores."""
    run_interpreted(1, check_in_the_interpreter, numbers)


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


@pytest.mark.parametrize(
    ("num_rows", "num_keys", "width", "tile"),
    [
        (1, 33_792, 512, 4096),  # 9 tiles, whose 4,608 keys are cut at once
        (32, 33_792, 512, 8192),
        (128, 33_792, 512, 16_384),  # more programs than run at the same time
        (1, 8192, 512, 8192),  # one launch
        (1, 133_120, 2048, 16_384),
        (1, 20_000, 9000, 32_768),  # twice the keys that a tile keeps
    ],
)
def test_tiles_of_a_row(num_rows: int, num_keys: int, width: int, tile: int) -> None:
    assert kernels._shared_tile(num_rows, num_keys, width) == tile


@pytest.mark.gpu
def test_candidates_may_be_anything() -> None:
    for num_candidates in (2500, 16384, 40_000):
        check_garbage("cuda", num_candidates, 2048)


@pytest.mark.gpu
def test_results_are_the_same_each_time() -> None:
    scores = torch.randn(64, 100_000, device="cuda").round(decimals=2)
    seq_lens = torch.full((64,), 100_000, dtype=torch.int32, device="cuda")
    first, *repeated = (spec.local_candidates(scores, seq_lens, seq_lens, 2048, Owner()) for _ in range(5))
    assert all(torch.equal(first, again) for again in repeated)


TYPES = {
    **{"scores_ptr": "*fp32", "out_ptr": "*i64", "candidates_ptr": "*i64"},
    **dict.fromkeys(("seq_lens_ptr", "local_seq_lens_ptr", "block_table_ptr", "request_ptr"), "*i32"),
    **dict.fromkeys(("num_first_ptr", "positions_ptr", "slots_ptr", "num_slots_ptr"), "*i32"),
}
RANK = {"DCP_RANK": 1, "DCP_SIZE": 8, "INTERLEAVE": 1}


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
    tile, num_warps = 4096, 4
    kernel, constants = getattr(kernels, name), {"TILE": tile, "WARPS": num_warps, **constants}
    compiled = compile_source(new_source(kernel, TYPES, constants, "stride|num_candidates"), {"num_warps": num_warps})
    loads = re.findall(r"ld\.global\.v4\.b32" if width == 4 else r"ld\.global\.v2\.b64", compiled.asm["ptx"])
    assert len(loads) >= tile // (width * 32 * num_warps)
    assert compiled.metadata.shared <= tile


@on_both
def test_operators(device: str) -> None:
    """Check the schema, and the shapes for tracing."""
    lens = torch.tensor([0, 9, 3], dtype=torch.int32, device=device)
    candidates = torch.full((3, 12), EMPTY, device=device)
    selection = SelectedTokens.empty(3, 5, device)
    blocks, request = torch.arange(9, dtype=torch.int32, device=device).view(3, 3), lens.new_tensor([2, 0, 2])
    torch.library.opcheck(spec.local_candidates.op, (torch.randn(3, 12, device=device), lens, lens, 5, 0, 1, 1))
    torch.library.opcheck(spec.choose_tokens.op, (candidates, blocks, request, 4, 0, 1, 1, *selection))
