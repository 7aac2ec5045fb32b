"""Rows that tokens of DeepSeek-V4 see, in windows that layers share, too: each ring's rows are the first's, moved.

Kernels run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

import itertools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

from dcpmla.attention.layers.compressed import visible
from dcpmla.attention.layers.compressed.calls import ChunkEntries, VisibleTokens
from dcpmla.attention.layers.compressed.kernels import visible as kernels
from dcpmla.attention.layers.compressed.visible import append_entries, ring_states, visible_in_rings, visible_rows
from dcpmla.ownership import Owner
from tests.support.hopper import ptx_for_hopper
from tests.support.kernels import on, on_both, run_kernels

SIZES = 2, 4, 8, 8  # ratio, entries of a block, window, rows of a request's window


def visible_cases() -> Iterator[list[Any]]:
    """Arguments of `visible_rows`: decodes in windows and far past them, padding, ranks without rows."""
    positions = torch.tensor([0, 5, 7, 8, 63, 64, 1500, 40])
    request = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.int32)
    states = torch.tensor([3, 1, 0, 4, 2, 6, 5, -1], dtype=torch.int32)
    table = torch.randperm(8 * 50).view(8, 50).to(torch.int32)
    for ratio, owner in itertools.product((0, 4, 16), (Owner(), Owner(2, 3, 1), Owner(1, 2, 4))):
        yield [positions, request, states, table, ratio, 8 if ratio == 4 else 4, 12, 16, owner]


def check_visible(device: str) -> None:
    for arguments in visible_cases():
        wanted, num = visible_rows(VisibleTokens(*arguments))
        got, got_num = kernels.visible_rows(VisibleTokens(*on(device, arguments)))
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        assert torch.equal(got_num.cpu(), num)
        is_listed = torch.arange(wanted.shape[1]) < num[:, None]
        assert num.max() <= wanted.shape[1]
        assert torch.equal(got.cpu()[is_listed], wanted[is_listed])


def append_cases() -> Iterator[list[Any]]:
    """Arguments of `append_entries`: lists of several tiles, empty ones, tokens without an entry in the chunk."""
    num = torch.tensor([0, 3, 1200, 0, 7], dtype=torch.int32)
    first = torch.tensor([0, 40, 100, 0, 1000], dtype=torch.int32)
    end = torch.tensor([50, 40, 1900, 1, 1001], dtype=torch.int32)
    base = torch.tensor([1300, 9, 0, 5, 1 << 30], dtype=torch.int32)
    for width, topk in ((1200, 2000), (1200, 6), (0, 600), (0, 0)):
        rows = torch.arange(5 * width, dtype=torch.int32).view(5, width)
        entries = torch.stack([torch.randperm(2000)[:topk] for _ in range(5)]).to(torch.int32)
        entries[0, topk // 2 :] = -1
        yield [rows, num.clamp(max=width), entries, first, end, base]


def check_append(device: str) -> None:
    for arguments in append_cases():
        rows, num, entries, first, end, base = arguments
        there = on(device, arguments)
        results = (
            append_entries(rows, num, entries, ChunkEntries(first, end, base)),
            kernels.append_entries(*there[:3], ChunkEntries(*there[3:])),
        )
        for token in range(len(rows)):
            here = [entry for entry in entries[token].tolist() if first[token] <= entry < end[token]]
            listed = rows[token, : num[token]].tolist() + [entry + int(base[token] - first[token]) for entry in here]
            for listed_rows, num_listed in results:
                assert (listed_rows.dtype, num_listed.dtype) == (torch.int32, torch.int32)
                assert listed_rows.shape == (len(rows), rows.shape[1] + entries.shape[1])
                assert listed_rows[token, : num_listed[token]].tolist() == listed


def check_rings(device: str) -> None:
    """Compare any number of requests, some of which are padding, with a list for each ring in torch."""
    table = torch.arange(30, 80, dtype=torch.int32).view(5, 10)
    rings = (1, Owner()), (2, Owner(1, 2, 2)), (4, Owner())
    for num_reqs, (num_rings, owner), listing in itertools.product(
        range(6), rings, (visible_rows, kernels.visible_rows)
    ):
        states = torch.tensor([3, -1, 0, 2, -1], dtype=torch.int32)[5 - num_reqs :]
        positions, request = torch.tensor([0, 9, 30, 17, 5])[:num_reqs], torch.arange(num_reqs, dtype=torch.int32)
        call = VisibleTokens(positions, request, states, table[:num_reqs], *SIZES, owner)
        there = on(device, call)
        in_rings = ring_states(there.states, num_rings, 5)
        with patch.object(visible, "visible_rows", listing):
            rows, num = visible_in_rings(there._replace(states=in_rings))
        assert rows.shape[:2] == num.shape == (num_rings, num_reqs)
        for ring, states_of_ring in enumerate(ring_states(states, num_rings, 5)):
            assert {part[ring].data_ptr() % 16 for part in (rows, num, in_rings) if num_reqs} <= {0}
            assert states_of_ring.tolist() == [-1 if state < 0 else state + 5 * ring for state in states.tolist()]
            expected, num_expected = visible_rows(call._replace(states=states_of_ring))
            assert num[ring].tolist() == num_expected.tolist()
            for token, count in enumerate(num_expected.tolist()):
                assert rows[ring, token, :count].tolist() == expected[token, :count].tolist()


@on_both
def test_kernels(device: str) -> None:
    run_kernels(device, check_visible, check_append, check_rings)


def test_operators() -> None:
    for arguments in visible_cases():
        torch.library.opcheck(visible_rows.op, visible_rows.flatten(VisibleTokens(*arguments)))
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    for arguments in append_cases():
        torch.library.opcheck(append_entries.op, arguments, test_utils=checks)  # rows after the last may be anything


def test_kernels_compile_for_hopper() -> None:
    types = dict.fromkeys(("request_ptr", "states_ptr", "table_ptr"), "*i32") | {"positions_ptr": "*i64"}
    for has_entries in (False, True):
        ptx_for_hopper(kernels.visible_kernel, "i32", {"HAS_ENTRIES": has_entries}, **types)
    ptx_for_hopper(kernels.append_kernel, "i32", {})
