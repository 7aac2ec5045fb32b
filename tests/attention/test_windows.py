"""Windows as selections: positions and slots for every layout of the cache, the kernel, contexts that windows reach."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla.attention.backends.calls import PrefillCall
from dcpmla.attention.backends.mask import selection_mask
from dcpmla.attention.layers.windowed.kernels import select as kernels
from dcpmla.attention.layers.windowed.select import select_window
from dcpmla.attention.layers.windowed.step import WindowMetadata, of_window, with_windows
from dcpmla.attention.select.slots import SlotLayout
from dcpmla.attention.select.step import SelectedTokens, SparseMetadata, with_selection
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.operators import import_kernel
from dcpmla.ownership import Owner
from tests.support.hopper import ptx_for_hopper
from tests.support.kernels import on_both, run_kernels
from tests.support.layouts import dcp_config
from tests.support.prefill_checks import check_prefill, segments
from tests.support.steps import part

BLOCK_SIZE = 8
LAYOUTS = ((1, 1), (2, 1), (3, 4), (4, 8))  # DCP size, interleave
SEQ_LENS = (1, 7, 0, 40, 12, 13, 95)  # 0 is padding


def selected(
    function: Any, window: int, seq_lens: tuple[int, ...], rank: int, cut: tuple[int, int], device: str = "cpu"
) -> Any:
    table = torch.randperm(len(seq_lens) * 12, generator=torch.Generator().manual_seed(1)).view(-1, 12).to(torch.int32)
    lens, request = torch.tensor(seq_lens, dtype=torch.int32), torch.arange(len(seq_lens), dtype=torch.int32)
    memory = SelectedTokens.empty(len(seq_lens), window, device)
    layout = SlotLayout(table.to(device), request.to(device), BLOCK_SIZE, Owner(rank, *cut))
    function(lens.to(device), layout, memory)
    return table, memory


@given(window=st.integers(1, 30), seq_lens=st.tuples(*[st.integers(0, 95)] * 3), layout=st.sampled_from(LAYOUTS))
def test_windows(window: int, seq_lens: tuple[int, ...], layout: tuple[int, int]) -> None:
    """All ranks have the same positions, and each rank the slots of its own."""
    for rank in range(layout[0]):
        table, memory = selected(select_window, window, seq_lens, rank, layout)
        for row, seq_len in enumerate(seq_lens):
            expected = list(range(max(0, seq_len - window), seq_len))
            assert memory.positions[row].tolist() == expected[::-1] + [-1] * (window - len(expected))
            positions = torch.tensor(expected, dtype=torch.int64)
            slots = Owner(rank, *layout).slot_mapping(positions, table[row], BLOCK_SIZE).tolist()
            assert memory.slots[row, : memory.num_slots[row]].tolist() == [slot for slot in slots if slot >= 0]


def check_kernel(device: str) -> None:
    for layout in LAYOUTS:
        for rank in range(layout[0]):
            _, expected = selected(select_window, 12, SEQ_LENS, rank, layout)
            _, result = selected(kernels.select_window, 12, SEQ_LENS, rank, layout, device)
            assert torch.equal(result.positions.cpu(), expected.positions)
            assert torch.equal(result.num_slots.cpu(), expected.num_slots)
            for slots, expected_slots, num in zip(result.slots.cpu(), expected.slots, expected.num_slots, strict=True):
                assert torch.equal(slots[:num], expected_slots[:num])


def check_prefill_kernel(device: str, folder: str = "triton", widths: tuple[int, int, int] = (32, 16, 32)) -> None:
    """Check a kernel over keys of P + R columns and values of V (`widths`), with a window and a wider bound of it."""
    run, window, query_lens = import_kernel(f"dcpmla.attention.{folder}.prefill:run"), 20, [300, 5, 170]

    def draw_windows(_: int, num_keys: int) -> Tensor:
        last = torch.tensor([index for length in query_lens for index in range(length)], dtype=torch.int32)
        positions = (last[:, None] - torch.arange(window)).clamp(min=-1).to(torch.int32)
        start_loc = segments(query_lens, "cpu").start_loc
        return selection_mask(positions, start_loc, torch.zeros(3, dtype=torch.int32), num_keys)

    def run_twice(call: PrefillCall) -> tuple[Tensor, Tensor]:
        out, lse = run(call)
        if call.window == window:  # a key before all windows of its tile is not read
            hidden = call._replace(k_nope=call.k_nope.clone())
            hidden.k_nope[:120] = torch.nan
            assert torch.equal(run(hidden)[0][299], out[299])
        return out, lse

    for bound in (window, window + 100):
        check_prefill(run_twice, (query_lens, None, 2, widths), torch.float16, device, draw_windows, bound)


@on_both
def test_kernels(device: str) -> None:
    """Prefill leaves out keys before the window."""
    run_kernels(device, check_kernel, check_prefill_kernel)


@pytest.mark.gpu
def test_hopper_s_kernel_leaves_out_keys_before_the_window() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    check_prefill_kernel("cuda", "hopper", (128, 64, 128))


def test_the_kernel_compiles() -> None:
    names = ("table_ptr", "request_ptr", "lens_ptr", "positions_ptr", "slots_ptr", "num_slots_ptr")
    ptx_for_hopper(kernels.window_kernel, "bf16", {"WINDOW": 512, "COLUMNS": 512}, **dict.fromkeys(names, "*i32"))


@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (2, 2)])
def test_prefills_read_the_context_that_windows_reach(size: int, interleave: int) -> None:
    """At most a window and what aligns it, whatever the context; a window that reaches the first token reads all."""
    dcp, window = dcp_config(size, size, interleave, block_size=16), 20
    context_lens, query_lens = (300, 5, 150), (7, 3, 2)
    seq_lens = [context + query for context, query in zip(context_lens, query_lens, strict=True)]
    tables = [list(range(20 * row, 20 * row + 20)) for row in range(3)]
    built = StepBuilder(dcp, 0).build(StepRequests(query_lens, seq_lens, tables), num_decodes=0)
    cos_sin = torch.zeros(built.num_tokens, 4)
    step = with_windows(with_selection(built, window), window, cos_sin)
    windows = part(step, WindowMetadata)
    assert windows.prefill.queries.start == step.prefill.queries.start
    assert windows.prefill.queries.start_loc is step.prefill.queries.start_loc
    assert windows.prefill.first_position is step.prefill.first_position
    assert windows.prefill.window == window
    (chunk,) = windows.prefill.context_chunks
    lens, first = chunk.keys.lens, chunk.first_position.tolist()
    for length, begin, context in zip(lens, first, context_lens, strict=True):
        assert begin % dcp.chunk_alignment == 0
        assert begin + length == context
        assert begin <= max(0, context - window + 1)
        assert length < window + dcp.chunk_alignment
    seen = of_window(step)
    assert seen.prefill is windows.prefill
    assert seen.cos_sin is cos_sin
    assert of_window(seen) is seen
    sparse = part(seen, SparseMetadata)
    assert sparse is windows.sparse
    assert sparse.selection.positions.shape == (12, window)
    again = with_windows(built, window, cos_sin).get(WindowMetadata)  # a module of drafts lays out no contexts again
    assert again.prefill is windows.prefill
    assert again.sparse.selection is not sparse.selection


def test_short_contexts_select_nothing() -> None:
    steps = StepBuilder(dcp_config(1, 1, 1, block_size=16), 0)
    step = steps.build(StepRequests([1], [64], [[0, 1, 2, 3]]))
    for each in (step, step.nth_token(0)):
        windows = with_windows(each, 64, torch.zeros(1, 4)).get(WindowMetadata)
        assert windows.sparse.selection is None
        assert windows.prefill is None


def test_a_captured_step_has_angles_alone() -> None:
    """Contexts and selections come with the step of each replay."""
    step = StepBuilder(dcp_config(1, 1, 1, block_size=16), 0).build(StepRequests([40], [90], [list(range(6))]))
    cos_sin = torch.zeros(40, 4)
    captured = with_windows(replace(step, defer=lambda work, arguments: None), 20, cos_sin)
    assert captured.get(WindowMetadata) == WindowMetadata(cos_sin=cos_sin)
