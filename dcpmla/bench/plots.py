"""Plots of plans and benchmarks. matplotlib (the extra `plot`) is imported when one is asked for."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcpmla.cli.output import check_writable, is_same_path, write_bytes
from dcpmla.planning.recommend import Plan


def check_outputs(json: Path | None, plot: Path | None, inputs: Sequence[Path] = ()) -> None:
    """Raise ValueError unless --json and --plot (None: not wanted) can be written, are two files, and none of the files
    that are read.
    """
    written = {option: path for option, path in (("--json", json), ("--plot", plot)) if path is not None}
    for option, path in written.items():
        check_writable(option, path)
        if any(is_same_path(path, read) for read in inputs):
            raise ValueError(f"{option} is {path}, which is read; give the name of another file")
    if json is not None and plot is not None and is_same_path(json, plot):
        raise ValueError(f"--json and --plot are both {json}; give two files")
    _check_plotting(plot)


def _check_plotting(path: Path | None) -> None:
    """Raise ValueError if a plot is wanted, but matplotlib is not there or cannot write files with the path's ending."""
    if path is None:
        return
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib; install the extra: pip install 'dcpmla[plot]'") from error
    allowed = matplotlib.figure.Figure().canvas.get_supported_filetypes()
    if _kind(path) not in allowed:
        raise ValueError(f"--plot is {path}; its ending must be one of {', '.join(sorted(allowed))}")


def plot_plans(path: Path, plans: Sequence[Plan], title: str) -> None:
    """Step times, stacked by part, and the tokens that fit, a bar for each plan."""
    figure, (steps, tokens) = new_figure(title, num_axes=2, width=max(6.4, 0.9 * len(plans)))
    names = [f"tp {plan.tp}\ndcp {plan.dcp}\n{plan.kv_cache_dtype}" for plan in plans]
    bottom = [0.0] * len(plans)
    for part in [part for part in plans[0].step_us if part != "total"]:
        heights = [plan.step_us[part] / 1e3 for plan in plans]
        steps.bar(names, heights, bottom=bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    steps.set_ylabel("decode step, ms")
    steps.legend()
    tokens.bar(names, [plan.kv_tokens_total / 1e6 for plan in plans])
    tokens.set_ylabel("tokens that fit, millions")
    save_figure(path, figure)


def plot_scaling(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Times over DCP sizes at the largest load: exchange operations, and steps by TP size.

    Dots are measured, dashed lines predicted.
    """
    figure, (exchanges, steps) = new_figure(title, num_axes=2, width=9.6)
    _plot_series(exchanges, [row for row in rows if "operation" in row], "num_tokens", ("operation", "backend"))
    _plot_series(steps, [row for row in rows if row.get("part") == "total"], "batch", ("tp",))
    exchanges.set_ylabel("exchange of one layer, us")
    steps.set_ylabel("decode step of the attention layers, us")
    save_figure(path, figure)


def _plot_series(axes: Any, rows: Sequence[dict[str, Any]], load: str, names: Sequence[str]) -> None:
    """One line for each value of the names, at the largest load (and context)."""
    largest = [max((row.get(key, 0) for row in rows), default=0) for key in (load, "context")]
    rows = [row for row in rows if [row.get(key, 0) for key in (load, "context")] == largest]
    keys = ("num_ranks", *names)
    for color, series in enumerate(dict.fromkeys(tuple(row.get(key) for key in keys) for row in rows)):
        points = sorted(
            (row for row in rows if tuple(row.get(key) for key in keys) == series), key=lambda row: row["dcp"]
        )
        label = " ".join(
            f"{key} {row_value}" if isinstance(row_value, int) else row_value
            for key, row_value in zip(keys, series, strict=True)
            if row_value
        )
        sizes = [row["dcp"] for row in points]
        axes.plot(sizes, [row["predicted_us"] for row in points], "x--", color=f"C{color % 10}", label=label)
        if all("median_us" in row for row in points):
            axes.plot(sizes, [row["median_us"] for row in points], "o", color=f"C{color % 10}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda size, _: f"{size:g}")
    axes.set_yscale("log")
    axes.set_xlabel("DCP size")
    if rows:
        axes.legend(
            fontsize="small", loc="upper left", bbox_to_anchor=(1.02, 1)
        )  # beside the axes: there may be many lines


def new_figure(title: str, num_axes: int, width: float = 6.4) -> tuple[Any, Any]:
    """A figure of its own, no window and no global state, with axes of a width in inches side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * num_axes, 4.8), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(1, num_axes, squeeze=False)[0]


def save_figure(path: Path, figure: Any) -> None:
    """Write a figure, whole or not at all; the path's ending chooses the format (see `check_outputs`)."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=_kind(path))
    write_bytes(path, buffer.getvalue())


def _kind(path: Path) -> str:
    return path.suffix.removeprefix(".").lower() or "png"
