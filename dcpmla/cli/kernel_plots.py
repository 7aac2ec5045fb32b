"""Plots of `bench decode`, `bench layer` and `bench exchange`."""

from collections.abc import Mapping, Sequence
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

from dcpmla.cli.layer_stack import PARTS
from dcpmla.cli.plots import new_figure, save_figure

Row = dict[str, Any]
Load = tuple[int, int]  # requests, cached tokens of each
Layout = tuple[int, str]  # DCP size, exchange
_STYLES = ("-", "--", "-.", ":")
_MARKERS = "o^sdvx"  # of exchange operations and their variants


def plot_decode(path: Path, rows: Sequence[Row], title: str) -> None:
    """A plot for each number of heads: every kernel's share of the floor's speed. And one of the first kernel's ratio to its best peer."""
    heads, query_lens = sorted({row["num_heads"] for row in rows}), sorted({row["query_len"] for row in rows})
    kernels, loads = list(dict.fromkeys(row["kernel"] for row in rows)), sorted({_load(row) for row in rows})
    figure, axes = new_figure(title, num_axes=len(heads) + 1, width=max(4.8, 0.4 * len(loads)))
    for axis, num_heads in zip(axes, heads, strict=False):
        for kernel in kernels:
            mine = _select(rows, kernel=kernel, num_heads=num_heads, query_len=query_lens[0])
            _plot_over_loads(axis, loads, {_load(row): row["floor_share"] for row in mine}, kernel)
        axis.set_title(f"{num_heads} heads, {query_lens[0]} new")
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("share of the floor's speed")
    for num_heads in heads:
        for query_len in query_lens:
            mine = _select(rows, kernel=kernels[0], num_heads=num_heads, query_len=query_len)
            ratios = {_load(row): ratio for row in mine if (ratio := best_peer_ratio(row)) is not None}
            if ratios:
                _plot_over_loads(axes[-1], loads, ratios, f"{num_heads} heads, {query_len} new")
    axes[-1].axhline(1.0, color="black", linewidth=0.8)
    axes[-1].set_title(f"the best peer's time over {kernels[0]}'s")
    save_figure(path, figure)


def best_peer_ratio(row: Row) -> float | None:
    """The time of the fastest peer over that of the row's kernel; None without peers."""
    return min((value for key, value in row.items() if key.startswith("speedup_over_")), default=None)


def plot_layer(path: Path, rows: Sequence[Row], title: str) -> None:
    """Parts of a step over contexts, stacked, a bar for each layout of the cache, at the smallest and largest batch; and all speedups."""
    batches, layouts = sorted({row["batch"] for row in rows}), list(dict.fromkeys(_layout(row) for row in rows))
    shown = list(dict.fromkeys([batches[0], batches[-1]]))
    figure, axes = new_figure(title, num_axes=len(shown) + 1, width=max(6.4, 0.8 * len(layouts)))
    for axis, batch in zip(axes, shown, strict=False):
        _plot_parts(axis, [row for row in rows if row["batch"] == batch], layouts)
        axis.set_title(f"{batch} requests; bars: {', '.join(_name(layout) for layout in layouts)}", fontsize="small")
    axes[0].set_ylabel("time of the parts / of the slowest layout's")
    plain = {_load(row): row["median_us"] for row in rows if row["part"] == "total" and row["dcp"] == 1}
    for layout in layouts:
        totals = {_load(row): row["median_us"] for row in rows if row["part"] == "total" and _layout(row) == layout}
        points = sorted(
            (batch * context, plain[batch, context] / totals[batch, context]) for batch, context in totals.keys() & plain.keys()
        )
        axes[-1].plot([tokens for tokens, _ in points], [ratio for _, ratio in points], "o", label=_name(layout))
    axes[-1].set_xscale("log", base=2)
    axes[-1].set_xlabel("cached tokens of all requests")
    axes[-1].set_ylabel("time under dcp 1 / time")
    axes[-1].legend(fontsize="small")
    save_figure(path, figure)


def plot_exchange(path: Path, rows: Sequence[Row], title: str) -> None:
    """A plot for each number of heads: times over tokens; a colour for each backend, a marker for each operation, a style for each size."""
    backends, operations = (list(dict.fromkeys(map(key, rows))) for key in (itemgetter("backend"), itemgetter("op", "variant")))
    sizes = sorted({row["world_size"] for row in rows})
    heads = sorted({row["heads"] for row in rows if row["heads"] is not None})
    figure, axes = new_figure(title, num_axes=len(heads) or 1)
    lines = list(product(enumerate(operations), enumerate(backends), enumerate(sizes)))
    for axis, num_heads in zip(axes, heads or [None], strict=True):
        mine = [row for row in rows if row["heads"] in (num_heads, None)]  # a context has no heads
        for (marker, (op, variant)), (color, backend), (style, size) in lines:
            points = sorted(map(itemgetter("tokens", "median_us"), _select(mine, op=op, variant=variant, backend=backend, world_size=size)))
            if points:
                look = {"color": f"C{color}", "marker": _MARKERS[marker], "linestyle": _STYLES[style % len(_STYLES)]}
                label = " ".join(filter(None, (op, backend, variant))) + f", {size} ranks"
                axis.plot(*zip(*points, strict=True), label=label, **look)
        axis.set_title(f"{num_heads} heads" if num_heads else "")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("tokens")
    axes[0].set_ylabel("us")
    axes[-1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.02, 1))  # beside the axes: there are many lines
    save_figure(path, figure)


def _plot_parts(axis: Any, rows: Sequence[Row], layouts: Sequence[Layout]) -> None:
    contexts, width = sorted({row["context"] for row in rows}), 0.8 / len(layouts)
    sums = {(row["context"], _layout(row)): row["sum_of_parts_us"] for row in rows if row["part"] == "total"}
    slowest = {context: max(time for (other, _), time in sums.items() if other == context) for context in contexts}
    places = {key: contexts.index(key[0]) + width * layouts.index(key[1]) for key in sums}
    bottoms = dict.fromkeys(sums, 0.0)
    for part in PARTS:
        heights = {(row["context"], _layout(row)): row["median_us"] / slowest[row["context"]] for row in rows if row["part"] == part}
        axis.bar([places[key] for key in heights], heights.values(), width * 0.9, [bottoms[key] for key in heights], label=part)
        bottoms = {key: bottom + heights.get(key, 0.0) for key, bottom in bottoms.items()}
    axis.set_xticks([number + width * (len(layouts) - 1) / 2 for number in range(len(contexts))], [f"{context:,}" for context in contexts])
    axis.set_xlabel("cached tokens of each request")
    axis.set_ylim(0, 1.2)
    axis.legend(fontsize="small", loc="upper center", ncols=len(PARTS))


def _plot_over_loads(axis: Any, loads: Sequence[Load], values: Mapping[Load, float], label: str) -> None:
    axis.plot([loads.index(load) for load in values], list(values.values()), ".-", label=label)
    axis.set_xticks(range(len(loads)), [f"{batch} x {context:,}" for batch, context in loads], rotation=90)
    axis.legend(fontsize="small")


def _select(rows: Sequence[Row], **setting: Any) -> list[Row]:
    return [row for row in rows if setting.items() <= row.items()]


def _load(row: Row) -> Load:
    return row["batch"], row["context"]


def _layout(row: Row) -> Layout:
    return row["dcp"], row["dcp_comm_backend"]


def _name(layout: Layout) -> str:
    return f"dcp {layout[0]}" + (f" {layout[1]}" if layout[0] > 1 else "")
