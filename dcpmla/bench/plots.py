"""Figures, and whether they and other files can be written. matplotlib (the extra `plot`) is imported on demand."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcpmla.cli.output import check_writable, is_same_path, write_bytes
from dcpmla.extras import needed_by

MARKERS = "o^sdvxP*<>"
LINE_STYLES = ("-", "--", "-.", ":")
_LEGEND_ROWS = 18  # rows of small text that fit next to the axes


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


def new_figure(title: str, num_axes: int, width: float = 6.4) -> tuple[Any, Any]:
    """Return a figure of its own, without window or global state, and its axes, each so many inches wide."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * num_axes, 4.8), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(1, num_axes, squeeze=False)[0]


def save_figure(path: Path, figure: Any) -> None:
    """Write a figure, whole or not at all, in the format that the path's ending names."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=_kind(path))
    write_bytes(path, buffer.getvalue())


def plot_lines(axes: Any, lines: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str) -> None:
    """Draw points (x, y) by the labels of their lines, x on a logarithmic scale."""
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), "o-", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=0)


def legend_beside(axis: Any) -> None:
    """Add a legend to the right of axes with many lines."""
    axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.02, 1), ncols=-(-len(axis.lines) // _LEGEND_ROWS))


def select(rows: Sequence[dict[str, Any]], **setting: Any) -> list[dict[str, Any]]:
    """Return the rows with the fields given."""
    return [row for row in rows if setting.items() <= row.items()]


def _kind(path: Path) -> str:
    return path.suffix.removeprefix(".").lower() or "png"
