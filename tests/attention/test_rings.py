"""Windows in rows that layers share: each ring's rows are the rows of the first one, moved."""

import torch

from dcpmla.attention.compressed.rings import ring_states, visible_in_rings
from dcpmla.attention.compressed.visible import visible_rows

SIZES = 2, 4, 8, 8  # ratio, entries of a block, window, rows of a request's window


def test_rows_of_rings() -> None:
    """Padding sees nothing, and the data of each ring is aligned."""
    positions, request = torch.tensor([3, 9, 30]), torch.tensor([0, 1, 2], dtype=torch.int32)
    states, table = torch.tensor([1, 4, -1], dtype=torch.int32), torch.arange(30, 60, dtype=torch.int32).view(3, 10)
    layout = 0, 1, 1
    in_rings = ring_states(states, 3, 5)
    assert in_rings.tolist() == [[1, 4, -1], [6, 9, -1], [11, 14, -1]]
    rows, num = visible_in_rings(positions, request, in_rings, table, SIZES, layout)
    assert rows.shape[:2] == num.shape == (3, 3)
    for ring in range(3):
        expected, num_expected = visible_rows(positions, request, in_rings[ring], table, *SIZES, *layout)
        assert torch.equal(num[ring], num_expected)
        for token, count in enumerate(num_expected.tolist()):
            assert torch.equal(rows[ring, token, :count], expected[token, :count])
        assert {part[ring].data_ptr() % 16 for part in (rows, num, in_rings)} == {0}
    assert num[:, 2].tolist() == [0, 0, 0]


def test_a_step_without_decodes() -> None:
    no_tokens = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
    states, table = ring_states(torch.tensor([2], dtype=torch.int32), 2, 5), torch.zeros(1, 3, dtype=torch.int32)
    rows, num = visible_in_rings(*no_tokens, states, table, SIZES, (0, 1, 1))
    assert rows.shape[:2] == num.shape == (2, 0)
