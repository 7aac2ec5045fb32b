"""Plots of `bench decode`, `bench layer` and `bench exchange`."""

from collections.abc import Mapping, Sequence
from itertools import product
from operator import itemgetter
from pathlib import Path
from textwrap import fill
from typing import Any

from dcpmla.bench.cache_formats import quantized_name
from dcpmla.bench.crossover import Layout, Load, layout_of
from dcpmla.bench.layer_stack import PARTS
from dcpmla.bench.plots import new_figure, save_figure

Row = dict[str, Any]
_STYLES = ("-", "--", "-.", ":")
_MARKERS = "o^sdvxP*<>"  # of variants, and of operations of the exchange
_CHARACTERS_PER_INCH = 12  # of a small title
_LEGEND_ROWS = 18  # of small text that fit beside the axes


def plot_decode(path: Path, rows: Sequence[Row], title: str) -> None:
    """A plot for each number of heads: every kernel's share of the floor's speed. And one of the first kernel's
    ratio to its best peer.

    A kernel that was measured over several formats is drawn once for each.
    """
    heads, query_lens = sorted({row["num_heads"] for row in rows}), sorted({row["query_len"] for row in rows})
    rows = [{**row, "name": kernel_name(row)} for row in rows]
    names, loads = list(dict.fromkeys(row["name"] for row in rows)), sorted({_load(row) for row in rows})
    figure, axes = new_figure(title, num_axes=len(heads) + 1, width=max(4.8, 0.4 * len(loads)))
    for axis, num_heads in zip(axes, heads, strict=False):
        for name in names:
            mine = _select(rows, name=name, num_heads=num_heads, query_len=query_lens[0])
            _plot_over_loads(axis, loads, {_load(row): row["floor_share"] for row in mine}, name)
        axis.set_title(f"{num_heads} heads, {query_lens[0]} new")
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("share of the floor's speed")
    kernel = rows[0]["kernel"]
    for name, num_heads, query_len in product(names, heads, query_lens):
        mine = _select(rows, name=name, kernel=kernel, num_heads=num_heads, query_len=query_len)
        ratios = {_load(row): ratio for row in mine if (ratio := best_peer_ratio(row)) is not None}
        if ratios:
            _plot_over_loads(axes[-1], loads, ratios, f"{name}, {num_heads} heads, {query_len} new")
    axes[-1].axhline(1.0, color="black", linewidth=0.8)
    axes[-1].set_title(f"the best peer's time over {kernel}'s")
    save_figure(path, figure)


def best_peer_ratio(row: Row) -> float | None:
    """The time of the fastest peer over that of the row's kernel; None without peers."""
    return min(
        (value for key, value in row.items() if key.startswith("speedup_over_") and key != "speedup_over_bf16"),
        default=None,
    )


def kernel_name(row: Row) -> str:
    """Of a row of `bench decode`: the kernel, and what it reads where that is quantized."""
    return ", ".join(filter(None, [row["kernel"], quantized_name(row["kv_cache_dtype"], row["decode_query_dtype"])]))


def plot_layer(path: Path, rows: Sequence[Row], title: str) -> None:
    """Parts of a step over contexts, stacked, a bar for each layout of the cache, at the smallest and largest
    batch; and all speedups.

    Speedups are over dcp 1 with the same cache and queries; a colour for each DCP size and exchange, a marker for
    each variant of each.
    """
    batches, layouts = sorted({row["batch"] for row in rows}), sorted({*map(layout_of, rows)})
    shown = list(dict.fromkeys([batches[0], batches[-1]]))
    width = max(6.4, 0.5 * len(layouts))
    figure, axes = new_figure(title, num_axes=len(shown) + 1, width=width)
    for axis, batch in zip(axes, shown, strict=False):
        mine = _select(rows, batch=batch)
        bars = [layout for layout in layouts if layout in map(layout_of, mine)]  # a variant may want more requests
        _plot_parts(axis, mine, bars)
        names = f"{batch} requests; bars: {', '.join(map(str, bars))}"
        axis.set_title(fill(names, int(_CHARACTERS_PER_INCH * width)), fontsize="small")
    axes[0].set_ylabel("time of the parts / of the slowest layout's")
    totals = {
        layout: {_load(row): row["median_us"] for row in rows if row["part"] == "total" and layout_of(row) == layout}
        for layout in layouts
    }
    plain = {layout.dtypes: times for layout, times in totals.items() if layout.dcp == 1}
    sizes, variants = (
        list(dict.fromkeys(layout[:2] for layout in layouts)),
        list(dict.fromkeys(layout[2:] for layout in layouts)),
    )
    for layout, times in totals.items():
        unsharded = plain.get(layout.dtypes, {})
        points = sorted(
            (batch * context, unsharded[batch, context] / times[batch, context])
            for batch, context in times.keys() & unsharded.keys()
        )
        marker = _MARKERS[variants.index(layout[2:]) % len(_MARKERS)]
        look = {"color": f"C{sizes.index(layout[:2])}", "marker": marker, "linestyle": ""}
        axes[-1].plot([tokens for tokens, _ in points], [ratio for _, ratio in points], label=str(layout), **look)
    axes[-1].set_xscale("log", base=2)
    axes[-1].set_xlabel("cached tokens of all requests")
    axes[-1].set_ylabel("time under dcp 1 / time")
    _legend_beside(axes[-1])
    save_figure(path, figure)


def plot_exchange(path: Path, rows: Sequence[Row], title: str) -> None:
    """A plot for each number of heads: times over tokens; a colour for each backend, a marker for each operation, a
    style for each size.
    """
    backends, operations = (
        list(dict.fromkeys(map(key, rows))) for key in (itemgetter("backend"), itemgetter("op", "variant"))
    )
    sizes = sorted({row["world_size"] for row in rows})
    heads = sorted({row["heads"] for row in rows if row["heads"] is not None})
    figure, axes = new_figure(title, num_axes=len(heads) or 1)
    lines = list(product(enumerate(operations), enumerate(backends), enumerate(sizes)))
    for axis, num_heads in zip(axes, heads or [None], strict=True):
        mine = [row for row in rows if row["heads"] in (num_heads, None)]  # a context has no heads
        for (marker, (op, variant)), (color, backend), (style, size) in lines:
            points = sorted(
                map(
                    itemgetter("tokens", "median_us"),
                    _select(mine, op=op, variant=variant, backend=backend, world_size=size),
                )
            )
            if points:
                look = {"color": f"C{color}", "marker": _MARKERS[marker], "linestyle": _STYLES[style % len(_STYLES)]}
                label = " ".join(filter(None, (op, backend, variant))) + f", {size} ranks"
                axis.plot(*zip(*points, strict=True), label=label, **look)
        axis.set_title(f"{num_heads} heads" if num_heads else "")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("tokens")
    axes[0].set_ylabel("us")
    _legend_beside(axes[-1])
    save_figure(path, figure)


def _plot_parts(axis: Any, rows: Sequence[Row], layouts: Sequence[Layout]) -> None:
    contexts, width = sorted({row["context"] for row in rows}), 0.8 / len(layouts)
    sums = {(row["context"], layout_of(row)): row["sum_of_parts_us"] for row in rows if row["part"] == "total"}
    slowest = {context: max(time for (other, _), time in sums.items() if other == context) for context in contexts}
    places = {key: contexts.index(key[0]) + width * layouts.index(key[1]) for key in sums}
    bottoms = dict.fromkeys(sums, 0.0)
    for part in PARTS:
        heights = {
            (row["context"], layout_of(row)): row["median_us"] / slowest[row["context"]]
            for row in rows
            if row["part"] == part
        }
        axis.bar(
            [places[key] for key in heights],
            heights.values(),
            width * 0.9,
            [bottoms[key] for key in heights],
            label=part,
        )
        bottoms = {key: bottom + heights.get(key, 0.0) for key, bottom in bottoms.items()}
    axis.set_xticks(
        [number + width * (len(layouts) - 1) / 2 for number in range(len(contexts))],
        [f"{context:,}" for context in contexts],
    )
    axis.set_xlabel("cached tokens of each request")
    axis.set_ylim(0, 1.2)
    axis.legend(fontsize="small", loc="upper center", ncols=len(PARTS))


def _plot_over_loads(axis: Any, loads: Sequence[Load], values: Mapping[Load, float], label: str) -> None:
    axis.plot([loads.index(load) for load in values], list(values.values()), ".-", label=label)
    axis.set_xticks(range(len(loads)), [f"{batch} x {context:,}" for batch, context in loads], rotation=90)
    axis.legend(fontsize="small")


def _legend_beside(axis: Any) -> None:
    """Where there are many lines."""
    axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.02, 1), ncols=-(-len(axis.lines) // _LEGEND_ROWS))


def _select(rows: Sequence[Row], **setting: Any) -> list[Row]:
    return [row for row in rows if setting.items() <= row.items()]


def _load(row: Row) -> Load:
    return row["batch"], row["context"]
