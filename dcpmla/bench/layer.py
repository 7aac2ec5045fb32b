"""Measure one decode step of a stack of attention layers under each DCP size, part by part, on one host or several: how
it scales, and from which context on DCP is faster than TP.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dcpmla.attention.mla.layer import PROJECT_FIRST_TOKENS
from dcpmla.attention.stack import Stack as AttentionStack
from dcpmla.bench.cache_formats import config_name, query_dtypes
from dcpmla.bench.ceilings import Ceilings, floor_fields, measure_ceilings
from dcpmla.bench.compressed_stack import CompressedStack
from dcpmla.bench.exchange_inputs import with_direct
from dcpmla.bench.geometries import GEOMETRIES, config_of
from dcpmla.bench.options import named, single
from dcpmla.bench.plots import draw_bars, draw_lines, grouped, new_figure, save_figure, select
from dcpmla.bench.results import Row
from dcpmla.bench.runner import Benchmark
from dcpmla.bench.stack import CANDIDATES, PARTS, Stack, StackSizes
from dcpmla.bench.words import name_of
from dcpmla.cli.options import positive
from dcpmla.config import DCPConfig
from dcpmla.extras import needed_by
from dcpmla.job.bootstrap import Ranks
from dcpmla.job.join import LOAD_TIMEOUT, Job
from dcpmla.parallel.mesh import init_mesh

_VARIANTS: dict[str, dict[str, Any]] = {  # fields of DCPConfig, by the names of `bench exchange`
    "": {},
    "pbm": {"dcp_project_before_merge": True},
    "q_replicate": {"dcp_q_replicate": True},
    "fp8": {"dcp_exchange_dtype": "fp8"},
}
_NAMES = ", ".join(filter(None, _VARIANTS))
_VARIANT = f"of {_NAMES} (direct alone); an empty name is the plain step, as in ,pbm; default: that alone"
_GEOMETRY = f"whose layers: {', '.join(GEOMETRIES)}, or a directory with a config.json"

Load = tuple[int, int]  # requests, cached tokens of each
MLA = "mla"  # a kind of layers; the others are `LayerKind.label`s


class Layout(NamedTuple):
    """Cache layout and exchange of a kind of layers, with the field names of `bench layer`'s rows; older files lack the
    fields with a default.
    """

    dcp: int
    exchange: str
    variant: str
    kv_cache_dtype: str
    decode_query_dtype: str = "auto"
    layer_kind: str = MLA
    index_cache_dtype: str = "auto"

    @property
    def compared(self) -> tuple[str, str, str, str]:
        """Kind of layers, dtypes of caches and queries. Layouts of the same ones are compared."""
        return self.layer_kind, self.kv_cache_dtype, self.decode_query_dtype, self.index_cache_dtype


class LayerCase(NamedTuple):
    """A load under one layout of the cache."""

    layout: Layout
    batch: int
    context: int


class Layer(Benchmark[LayerCase, Stack]):
    """Every load under all layouts, plain TP first; each kind of layers in stacks of its own.

    Attributes:
        makers: Makers of stacks, by the labels of their layers; with_indexer: Labels of those with an index cache.
        plain: Rows of plain TP, by load, kind and dtypes of caches and queries.
    """

    ranks_of = "tp"
    plot_help = "the parts of a step, and the speedup over TP"

    options = {
        "geometry": single(str, "deepseek-v3", "NAME_OR_DIR", _GEOMETRY),
        "tensor_parallel_size": single(positive, 1, "N", "ranks that cut the heads; all ranks of the job"),
        "decode_context_parallel_size": "1",
        "dcp_comm_backend": None,
        "variants": named([*_VARIANTS], "a variant", _VARIANT) | {"default": ""},
        "kv_cache_dtype": "bf16",
        "decode_query_dtype": "auto,fp8",
        "index_cache_dtype": "auto",
        "num_layers": single(positive, 8, "L", "layers of the stack"),
        "batch": "1,4,16,64,128",
        "context": "8192,32768,131072,524288",
    }
    series = ("part", *Layout._fields)

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        super().__init__(args, job)
        self.attention = _read_attention(args.geometry)
        self.config = self.attention.config
        self.makers = _stack_makers(self.attention)
        self.with_indexer = {kind.label for kind in getattr(self.config, "layer_kinds", ()) if kind.has_indexer}
        job.watchdog.enter("measuring the memory's rate", LOAD_TIMEOUT)
        self.ceilings: Ceilings = measure_ceilings(self.device, self.dtype)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # caches are planned by the device's free memory
        sizes = sorted(args.decode_context_parallel_size)
        self.meshes = {dcp: init_mesh(args.tensor_parallel_size, dcp) for dcp in sizes}
        self.layouts = [layout for dcp in sizes for layout in self._layouts(dcp)]
        self.plain: dict[tuple[Any, ...], list[Row]] = {}

    @staticmethod
    def check(args: argparse.Namespace, ranks: Ranks) -> None:
        _read_attention(args.geometry).config.heads_per_rank(args.tensor_parallel_size)  # raises with sizes that divide
        for dcp in args.decode_context_parallel_size:
            DCPConfig(tensor_parallel_size=args.tensor_parallel_size, decode_context_parallel_size=dcp)
        if "fp8" in args.variants and "direct" not in (args.dcp_comm_backend or ["direct"]):
            options = f"--variants has 'fp8', but --dcp-comm-backend is {','.join(args.dcp_comm_backend)}"
            raise ValueError(f"{options}; direct alone carries rows in fp8, add it")

    def _layouts(self, dcp: int) -> Iterator[Layout]:
        """Yield the layouts of a DCP size. Collective over the job."""
        args = self.args
        exchanges = [("none", "")]
        if dcp > 1:
            group = self.meshes[dcp].dcp_group
            backends = args.dcp_comm_backend or with_direct(("a2a",), group, self.device)
            exchanges = [pair for pair in product(backends, args.variants) if pair[1] != "fp8" or pair[0] == "direct"]
        for label, name in product(self.makers, args.kv_cache_dtype):
            dtypes = query_dtypes(name, args.decode_query_dtype)
            index_formats = args.index_cache_dtype if label in self.with_indexer else ["auto"]
            for index_format, dtype, exchange in product(index_formats, dtypes, exchanges):
                yield Layout(dcp, *exchange, name, dtype, label, index_format)

    def cases(self) -> Iterator[LayerCase]:
        for (batch, context), layout in product(self.product("batch", "context"), self.layouts):
            yield LayerCase(layout, batch, context)

    def inputs(self, case: LayerCase) -> Stack:
        layout = case.layout
        if layout.variant == "pbm" and case.batch < PROJECT_FIRST_TOKENS:
            raise ValueError(f"a step of fewer than {PROJECT_FIRST_TOKENS} tokens does not project before it merges")
        options: dict[str, Any] = {"decode_query_dtype": layout.decode_query_dtype}
        if layout.dcp > 1:
            options |= {"dcp_comm_backend": layout.exchange, **_VARIANTS[layout.variant]}
        options |= {"kv_cache_dtype": config_name(layout.kv_cache_dtype), "index_cache_dtype": layout.index_cache_dtype}
        load = [1] * case.batch, [case.context] * case.batch
        sizes = StackSizes(self.meshes[layout.dcp], self.args.num_layers, *load, self.device, self.dtype)
        return self.makers[layout.layer_kind](sizes, sizes.dcp_config(**options))

    def measure(self, case: LayerCase, inputs: Stack) -> list[Row]:
        """Return a row for each part, the total first, with the sum of its parts, each timed alone."""
        reads, timings, num_bytes, rows = inputs.reads, inputs.timings(), inputs.bytes_read(), list[Row]()
        common = {
            "geometry": self.args.geometry if self.args.geometry in GEOMETRIES else Path(self.args.geometry).name,
            "tp": self.args.tensor_parallel_size,
            "gpus_per_node": self.job.ranks.num_local_ranks,
            **case.layout._asdict(),
            "batch": case.batch,
            "context": case.context,
            "num_layers": self.args.num_layers,
            "heads": self.config.num_heads,
            "query_dim": reads.query_dim,
            "latent_dim": reads.out_dim,
        }
        for part, timing in timings.items():
            rows.append(self.row({"part": part}, timing, common, digits=1))
            if (read := num_bytes.get(part)) is not None:
                rows[-1] |= {"bytes_read": read, **floor_fields(self.ceilings.floor_us(read), rows[-1]["median_us"])}
        sums = {"sum_of_parts_us": PARTS, "exchange_us": ("gather", CANDIDATES, "combine")}
        for name, parts in sums.items():
            rows[0][name] = round(sum(timings[part].median_us for part in parts if part in timings), 1)
        setting = case.batch, case.context, case.layout.compared
        if case.layout.dcp == 1:
            self.plain[setting] = rows
        elif setting in self.plain:
            compare_with_plain(rows, self.plain[setting])
        return rows

    def summary(self, rows: Sequence[Row]) -> Iterator[str]:
        yield from super().summary(rows)
        for crossover in crossovers(rows):
            tokens = crossover["tokens"]
            loads = f"from {tokens:,} cached tokens on" if tokens else "at no load measured"
            yield f"{name_of(layout_of(crossover))} is faster than tp {self.args.tensor_parallel_size}: {loads}"

    def findings(self, rows: Sequence[Row]) -> dict[str, Any]:
        return super().findings(rows) | {"crossover": crossovers(rows)}

    @classmethod
    def plot(cls, path: Path, rows: Sequence[Row]) -> None:
        """Draw the parts of a step of the most requests with the longest contexts, a bar for each layout; and the
        speedups over dcp 1 with the same caches and queries.
        """
        load, (first, *_) = max(map(load_of, rows)), rows
        speedups = speedups_of(rows)
        title = f"{first['geometry']}, {first['num_layers']} attention layers, tp {first['tp']}"
        if best := max(((ratio, name) for name, points in speedups.items() for _, ratio in points), default=None):
            slowest = min(ratio for _, ratio in speedups[best[1]])
            title += f": {name_of(best[1])} is {slowest:.2f} to {best[0]:.2f} x as fast as dcp 1"
        figure, axes = new_figure(title, num_axes=2)
        times = {(layout_of(row), row["part"]): row["median_us"] for row in rows if load_of(row) == load}
        layouts, parts = (dict.fromkeys(column) for column in zip(*times, strict=True))
        names = [part for part in PARTS if part in parts]
        bars = {name_of(each): {part: times.get((each, part), 0.0) for part in names} for each in layouts}
        draw_bars(axes[0], bars, f"us of the parts of a step, {load[0]} x {load[1]:,} cached tokens")
        lines = {name_of(layout): points for layout, points in speedups.items()}
        draw_lines(axes[1], lines, "cached tokens of all requests", "speed / dcp 1's")
        axes[1].axhline(1, color="black", linewidth=0.8)
        save_figure(path, figure)


def _read_attention(geometry: str) -> AttentionStack:
    """Return the attention of one of GEOMETRIES or of a config's file or directory; layers of sparse MLA run as dense
    ones, without an indexer.
    """
    if geometry not in GEOMETRIES and not os.path.exists(geometry):
        names = ", ".join(GEOMETRIES)
        raise ValueError(f"--geometry is {geometry}: no such file or directory; give one, or one of {names}")
    with needed_by("bench layer"):
        from dcpmla.integrations.families.table import attention_of  # transformers takes seconds to import
        from dcpmla.integrations.model_files import load_config

    config = config_of(geometry) if geometry in GEOMETRIES else load_config(Path(geometry))
    attention = attention_of(config)
    return attention.dense_stack() or attention


def _stack_makers(attention: AttentionStack) -> dict[str, Callable[[StackSizes, DCPConfig], Stack]]:
    """Return the makers of stacks of a model's layers, by the labels of the layers."""
    if attention.dense_stack() is not None:
        return {MLA: partial(Stack, attention)}
    kinds = dict.fromkeys(attention.config.layer_kinds)
    return {kind.label: partial(CompressedStack, attention.config, kind) for kind in kinds}


# ---- layouts compared with plain TP


def layout_of(row: Mapping[str, Any]) -> Layout:
    """Return the layout of a row of `bench layer`."""
    return Layout(**{name: row[name] for name in Layout._fields if name in row})


def load_of(row: Mapping[str, Any]) -> Load:
    """Return a row's batch and context."""
    return row["batch"], row["context"]


def compare_with_plain(rows: Sequence[Row], plain_rows: Sequence[Row]) -> None:
    """Add to the rows of a step their comparison with the rows of plain TP (dcp 1) at the same load.

    `scaling_efficiency`, of the total, of attention and of the selection: the time under dcp 1 / (dcp x time). 1 is
    ideal: W ranks, each with 1 / W of the same cached tokens, take 1 / W of the time.
    `added_us_per_layer`, of the total: the time that sharding adds to a layer outside attention and the selection; the
    exchange of candidates counts as added. It is below zero where sharding saves more than it adds.
    """
    times, plain = ({row["part"]: row["median_us"] for row in step} for step in (rows, plain_rows))
    for row in rows:
        if row["part"] in ("total", "attention", "selection"):
            ideal = plain[row["part"]] / row["dcp"]
            row["scaling_efficiency"] = round(ideal / row["median_us"], 3)
        if row["part"] == "total":
            row["added_us_per_layer"] = round((_apart(times) - _apart(plain)) / row["num_layers"], 1)


def _apart(times: Mapping[str, float]) -> float:
    """Return the time of a step without attention and the selection, but with the exchange of candidates."""
    selection = times.get("selection", 0.0) - times.get(CANDIDATES, 0.0)
    return times["total"] - times["attention"] - selection


def speedups_of(rows: Sequence[Row]) -> dict[Layout, list[tuple[int, float]]]:
    """Return for each layout with a DCP size above 1 the cached tokens of all requests of each load, and the time under
    dcp 1, with the same kind of layers and the same dtypes, over its own. A load that only fits when sharded does not
    count.
    """
    totals = grouped(select(rows, part="total"), layout_of)
    times = {layout: {load_of(row): row["median_us"] for row in of_layout} for layout, of_layout in totals}
    plain = {layout.compared: of_loads for layout, of_loads in times.items() if layout.dcp == 1}
    speedups = {}
    for layout, of_loads in times.items():
        both = plain.get(layout.compared, {}).keys() & of_loads
        if layout.dcp > 1 and both:
            ratios = [(load[0] * load[1], plain[layout.compared][load] / of_loads[load]) for load in both]
            speedups[layout] = sorted(ratios)
    return speedups


def crossovers(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Compare every layout with a DCP size above 1 with dcp 1, the same kind of layers and the same dtypes.

    Returns:
        For each layout its fields, and `tokens`: the smallest total of cached tokens (batch x context) from which on
        every load is faster than under dcp 1, None where the largest is not.
    """
    results = []
    for layout, speedups in speedups_of(rows).items():
        slower = max((tokens for tokens, ratio in speedups if ratio <= 1), default=0)
        faster = min((tokens for tokens, _ in speedups if tokens > slower), default=None)
        results.append({**layout._asdict(), "tokens": faster})
    return results
