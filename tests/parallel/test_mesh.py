"""The mesh: each rank's groups, groups given by a serving stack, impossible sizes. Values of ranks as JSON."""

from typing import Any

import pytest
import torch.distributed as dist

from dcpmla import DCPMesh, init_mesh
from dcpmla.job.bootstrap import agree
from dcpmla.parallel.collectives import broadcast_value, gather_values
from tests.support.ranks import run_ranks


def check_grid() -> tuple[int, int, int, int, list[int], list[int]]:
    mesh = init_mesh(4, 2)
    ranks = dist.get_process_group_ranks(mesh.tp_group), dist.get_process_group_ranks(mesh.dcp_group)
    assert mesh.dcp_rank == mesh.tp_rank % mesh.dcp_size
    return mesh.tp_size, mesh.tp_rank, mesh.dcp_size, mesh.dcp_rank, *ranks


def test_grid_with_replicas() -> None:
    grid = run_ranks(8, check_grid)
    assert grid[0] == (4, 0, 2, 0, [0, 1, 2, 3], [0, 1])
    assert grid[3] == (4, 3, 2, 1, [0, 1, 2, 3], [2, 3])
    assert grid[6] == (4, 2, 2, 0, [4, 5, 6, 7], [6, 7])


def check_own_groups() -> None:
    """Check meshes of given groups, and that wrongly cut groups are refused."""
    neighbours = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    strided = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    rank = dist.get_rank()
    mesh = DCPMesh(dist.group.WORLD, neighbours[rank // 2])
    assert (mesh.tp_rank, mesh.dcp_rank) == (rank, rank % 2)
    with pytest.raises(
        ValueError, match=r"dcp_group has ranks \[[01], [23]\]; for rank . of the TP group .* is \[(0, 1|2, 3)\]"
    ):
        DCPMesh(dist.group.WORLD, strided[rank % 2])


def test_own_groups() -> None:
    run_ranks(4, check_own_groups)


def check_mistakes() -> str:
    """Check that sizes are refused, and that the first rank's mistake is every rank's."""
    with pytest.raises(ValueError, match=r"tensor_parallel_size \(-tp\) is 2, but the job has 3 ranks.*start 2 ranks"):
        init_mesh(2, 1)
    with pytest.raises(
        ValueError, match=r"\(-dcp\) is 2; it must divide tensor_parallel_size \(-tp\) 3: choose 1 or 3"
    ):
        init_mesh(3, 2)

    def disagree() -> None:
        with agree():
            if dist.get_rank() >= 1:
                raise ValueError(f"rank {dist.get_rank()} is unhappy")

    with pytest.raises(ValueError, match="rank 1") as error:
        disagree()
    with agree():
        pass
    return str(error.value)


def test_mistakes() -> None:
    assert run_ranks(3, check_mistakes) == ["rank 1 is unhappy"] * 3


VALUES: list[Any] = [
    {"a": [1, 2.5, None, True], "b": {"c": "x" * 5000}},
    "",
    "\ud800 \u00fc \U0001f600",
    [-(1 << 70)],
    0,
]


def check_values() -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    assert gather_values(VALUES[rank], None, "a test") == VALUES[:num_ranks]
    assert gather_values((rank, ()), None, "a test") == [[other, []] for other in range(num_ranks)]
    for value in VALUES:
        assert broadcast_value(value if rank == 0 else {"ignored": rank}, None, "a test") == value
    pairs = [dist.new_group([first, first + 1]) for first in range(0, num_ranks - 1, 2)]
    if rank // 2 < len(pairs):
        pair, first = pairs[rank // 2], rank // 2 * 2
        assert gather_values(rank, pair, "a test") == [first, first + 1]
        assert broadcast_value(rank, pair, "a test") == first


def test_values_of_all_ranks() -> None:
    run_ranks(5, check_values)
    run_ranks(1, check_values)
