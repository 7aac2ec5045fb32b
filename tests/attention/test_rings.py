"""Windows in rows that layers share: each ring's rows are the rows of the first one, moved.

The kernel runs on a GPU, in Triton's interpreter without one.
"""

import pytest
import torch

from dcpmla.attention.layers.compressed import visible
from dcpmla.attention.layers.compressed.calls import VisibleTokens
from dcpmla.attention.layers.compressed.visible import ring_states, visible_in_rings, visible_rows
from dcpmla.ownership import Owner
from tests.support.shared_memory import run_interpreted

SIZES = 2, 4, 8, 8  # ratio, entries of a block, window, rows of a request's window


def test_rows_of_rings() -> None:
    """Padding sees nothing, and the data of each ring is aligned."""
    positions, request = torch.tensor([3, 9, 30]), torch.tensor([0, 1, 2], dtype=torch.int32)
    states, table = torch.tensor([1, 4, -1], dtype=torch.int32), torch.arange(30, 60, dtype=torch.int32).view(3, 10)
    owner = Owner()
    in_rings = ring_states(states, 3, 5)
    assert in_rings.tolist() == [[1, 4, -1], [6, 9, -1], [11, 14, -1]]
    rows, num = visible_in_rings(VisibleTokens(positions, request, in_rings, table, *SIZES, owner))
    assert rows.shape[:2] == num.shape == (3, 3)
    for ring in range(3):
        expected, num_expected = visible_rows(VisibleTokens(positions, request, in_rings[ring], table, *SIZES, owner))
        assert torch.equal(num[ring], num_expected)
        for token, count in enumerate(num_expected.tolist()):
            assert torch.equal(rows[ring, token, :count], expected[token, :count])
        assert {part[ring].data_ptr() % 16 for part in (rows, num, in_rings)} == {0}
    assert num[:, 2].tolist() == [0, 0, 0]


def test_a_step_without_decodes() -> None:
    no_tokens = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
    states, table = ring_states(torch.tensor([2], dtype=torch.int32), 2, 5), torch.zeros(1, 3, dtype=torch.int32)
    rows, num = visible_in_rings(VisibleTokens(*no_tokens, states, table, *SIZES, Owner()))
    assert rows.shape[:2] == num.shape == (2, 0)


def check_kernel(device: str) -> None:
    """Compare any number of requests, some of which are padding, with a list for each ring in torch."""
    from dcpmla.attention.layers.compressed.kernels import visible as kernels

    table = torch.arange(30, 80, dtype=torch.int32).view(5, 10)
    for num_reqs in range(1, 6):
        states = torch.tensor([3, -1, 0, 2, -1][-num_reqs:], dtype=torch.int32)
        positions, request = torch.tensor([0, 9, 30, 17, 5][:num_reqs]), torch.arange(num_reqs, dtype=torch.int32)
        for num_rings, owner in ((1, Owner()), (2, Owner(1, 2, 2)), (4, Owner())):
            rings = ring_states(states, num_rings, 5)
            call = VisibleTokens(positions, request, states, table[:num_reqs], *SIZES, owner)
            expected = [visible_rows(call._replace(states=ring)) for ring in rings]
            there = *(each.to(device) for each in (positions, request)), ring_states(states.to(device), num_rings, 5)
            visible.visible_rows = kernels.visible_rows  # type: ignore[assignment]  # not the torch code
            rows, num = visible_in_rings(VisibleTokens(*there, table[:num_reqs].to(device), *SIZES, owner))
            for ring, (rows_expected, num_expected) in enumerate(expected):
                assert num[ring].tolist() == num_expected.tolist()
                for token, count in enumerate(num_expected.tolist()):
                    assert rows[ring, token, :count].tolist() == rows_expected[token, :count].tolist()


def test_the_kernel_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted(1, check_kernel, "cpu")


@pytest.mark.gpu
def test_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible, "visible_rows", visible_rows)  # undone afterwards
    check_kernel("cuda")
