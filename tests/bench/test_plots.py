"""Plots of result files: drawn from rows alone, labels apart, each shown by a page."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text

from dcpmla.bench import plots
from dcpmla.bench.plots import draw_bars, draw_lines, new_figure
from dcpmla.cli.bench import BENCHMARKS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("benchmark", "result"),
    [
        ("decode", "h200/decode"),
        ("prefill", "h200/prefill"),
        ("exchange", "h200x4/exchange"),
        ("layer", "h200x4/layer"),
    ],
)
def test_result_files_are_drawn(benchmark: str, result: str, tmp_path: Path) -> None:
    rows = json.loads((RESULTS / f"{result}.json").read_text())["rows"]
    kind = getattr(import_module(f"dcpmla.bench.{benchmark}"), BENCHMARKS[benchmark][0])
    kind.plot(tmp_path / "plot.png", rows)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_every_plot_is_shown_by_a_page() -> None:
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    drawn = [str(path.relative_to(ROOT)) for path in RESULTS.rglob("*.png")]
    assert drawn
    assert [path for path in drawn if path not in pages] == []


def test_labels_of_lines_are_apart() -> None:
    figure, (axis,) = new_figure("equal ends", num_axes=1)
    draw_lines(axis, {f"line {index}": [(1, 0.0), (8, 1.0)] for index in range(8)}, "x", "y")
    heights = sorted(text.get_position()[1] for text in axis.texts if isinstance(text, Text))
    assert len(heights) == 8
    assert all(high - low > 0.99 * plots._LABEL_HEIGHT for low, high in zip(heights, heights[1:], strict=False))
    assert 0 < heights[0] < heights[-1] <= 1


def test_bars_are_stacked_and_numbered() -> None:
    figure, (axis,) = new_figure("bars", num_axes=1)
    bars: dict[str, Any] = {"one": {"read": 1.0, "write": 2.0}, "other": {"read": 4.0}}
    draw_bars(axis, bars, "us")
    assert [text.get_text() for text in axis.texts] == ["3", "4"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["read", "write"]
