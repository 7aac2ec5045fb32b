"""Figures, and whether they and other files can be written. matplotlib (the extra `plot`) is imported on demand."""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

from dcpmla.bench.results import Row
from dcpmla.cli.output import check_writable, is_same_path, write_bytes
from dcpmla.extras import needed_by

Key = TypeVar("Key")
_LABEL_HEIGHT = 0.045  # heights are in heights of the axes


def check_outputs(json: Path | None, plot: Path | None, inputs: Sequence[Path] = ()) -> None:
    """Raise ValueError unless --json and --plot (None: not wanted) can be written, are two files, and none of the
    inputs: files that are read, and directories of models.
    """
    written = {option: path for option, path in (("--json", json), ("--plot", plot)) if path is not None}
    for option, path in written.items():
        check_writable(option, path)
        for read in inputs:
            if is_same_path(path, read):
                raise ValueError(f"{option} is {path}, which is read; give the name of another file")
            check_writable(option, path, read if read.is_dir() else None)
    if json is not None and plot is not None and is_same_path(json, plot):
        raise ValueError(f"--json and --plot are both {json}; give two files")
    if plot is not None:
        _check_plotting(plot)


def _check_plotting(path: Path) -> None:
    """Raise ValueError if matplotlib is not installed, or does not write files with the path's ending."""
    with needed_by("--plot"):
        import matplotlib.figure
    allowed = matplotlib.figure.Figure().canvas.get_supported_filetypes()
    if _kind(path) not in allowed:
        raise ValueError(f"--plot is {path}; its ending must be one of {', '.join(sorted(allowed))}")


def new_figure(title: str, num_axes: int, width: float = 6.4, height: float = 4.8) -> tuple[Any, Any]:
    """Return a figure of its own, without window or global state, and its axes, each so many inches wide."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * num_axes, height), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(1, num_axes, squeeze=False)[0]


def save_figure(path: Path, figure: Any) -> None:
    """Write a figure, whole or not at all, in the format that the path's ending names."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=_kind(path))
    write_bytes(path, buffer.getvalue())


def draw_lines(axis: Any, lines: Mapping[str, Iterable[tuple[float, float]]], x_label: str, y_label: str = "") -> None:
    """Draw points (x, y) of lines by their labels, right of the lines' ends, x on a logarithmic scale; of points with
    the same x the median.
    """
    for label, points in lines.items():
        at: dict[float, list[float]] = {}
        for x, y in sorted(points):
            at.setdefault(x, []).append(y)
        axis.plot([*at], [*map(median, at.values())], "o-", markersize=4, label=label)
    axis.set_xscale("log", base=2)
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    if axis.get_yscale() == "linear":
        axis.set_ylim(bottom=0)
    axis.margins(x=0.02)
    to_axes = axis.transScale + axis.transLimits
    ends = sorted(((to_axes.transform(line.get_xydata()[-1])[1], line) for line in axis.lines), key=itemgetter(0))
    heights, top = [height for height, _ in ends], 1.0
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + _LABEL_HEIGHT)
    for index in reversed(range(len(heights))):
        heights[index] = top = min(heights[index], top)
        top -= _LABEL_HEIGHT
    for height, (_, line) in zip(heights, ends, strict=True):
        look = {"color": line.get_color(), "fontsize": "small", "verticalalignment": "center"}
        axis.text(1.01, height, line.get_label(), transform=axis.transAxes, **look)


class Panel(NamedTuple):
    """One of the axes of a figure, with rows as lines.

    Attributes:
        names: Names of the axes, x and y.
    """

    title: str
    rows: Iterable[Row]
    x: Callable[[Row], float]
    y: Callable[[Row], float]
    names: tuple[str, str]
    is_logarithmic: bool = False


def draw_panels(
    path: Path, title: str, panels: Sequence[Panel], label: Callable[[Row], str], width: float = 4.8
) -> None:
    """Draw rows side by side, one line for each label, and write the figure."""
    figure, axes = new_figure(title, num_axes=len(panels), width=width)
    for axis, panel in zip(axes, panels, strict=True):
        axis.set_title(panel.title)
        if panel.is_logarithmic:
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter("{x:g}")
        lines = grouped(panel.rows, label)
        points = {name: [(panel.x(row), panel.y(row)) for row in of_line] for name, of_line in lines}
        draw_lines(axis, points, *panel.names)
    save_figure(path, figure)


def draw_bars(
    axis: Any, bars: Mapping[str, float | Mapping[str, float]], x_label: str, number: str = "{:,.0f}"
) -> None:
    """Draw horizontal bars by their labels, the first one at the top, with their lengths as numbers; parts of bars are
    stacked, and their names are below the figure. A length of 0 stands for none.
    """
    stacks = {label: parts if isinstance(parts, Mapping) else {"": parts} for label, parts in bars.items()}
    ends = dict.fromkeys(stacks, 0.0)
    for name in dict.fromkeys(name for parts in stacks.values() for name in parts):
        lengths = [parts.get(name, 0.0) for parts in stacks.values()]
        drawn = axis.barh([*stacks], lengths, left=[*ends.values()], label=name)
        ends = {label: end + length for (label, end), length in zip(ends.items(), lengths, strict=True)}
    axis.bar_label(drawn, [number.format(end) if end else "-" for end in ends.values()], padding=3)
    axis.set_xlabel(x_label)
    axis.set_xlim(0, 1.15 * max(ends.values()) or 1)
    axis.invert_yaxis()
    if any(name for parts in stacks.values() for name in parts):
        handles, labels = axis.get_legend_handles_labels()
        axis.figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False)


def select(rows: Sequence[Row], **setting: Any) -> list[Row]:
    """Return the rows with the fields given."""
    return [row for row in rows if setting.items() <= row.items()]


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> Iterable[tuple[Key, list[Row]]]:
    """Return the rows of each key, in the order of their first rows."""
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups.items()


def _kind(path: Path) -> str:
    return path.suffix.removeprefix(".").lower() or "png"
