"""What the commands that run a model print of its CUDA graphs."""

import pytest

from dcpmla.cli.options import graph_lines
from tests.support.hash_model import HashDrafter, make_engine


@pytest.mark.parametrize(
    ("with_drafts", "mixed", "lines"),
    [
        (False, False, ["decode graphs: 4, the largest of 8 requests"]),
        (True, False, ["decode graphs: 4, the largest of 8 requests; with drafts 4, the largest of 8"]),
        (
            False,
            True,
            [
                "decode graphs: 4, the largest of 8 requests",
                "graphs of steps with prompts: 2, the largest of 100 tokens; of one graph each 5, the largest of 100",
            ],
        ),
    ],
)
def test_lines_of_graphs(with_drafts: bool, mixed: bool, lines: list[str]) -> None:
    drafter = HashDrafter(3, 0.5) if with_drafts else None
    engine = make_engine(20, 100, 8, 64, with_graph=True, drafter=drafter, mixed=mixed)
    assert graph_lines(engine.graph, engine.mixed_graph) == lines


def test_no_graphs_no_lines() -> None:
    assert graph_lines(None, None) == []
