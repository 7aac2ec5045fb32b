"""A machine fitted to what was measured on it: its collectives, the runtime's attention, and the small kernels of a
layer.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dcpmla.planning.exchange import exchange_kind
from dcpmla.planning.machine import H200X8, PRESETS, Machine, change_machine, read_json
from dcpmla.planning.measured import EXCHANGES, Row, exchange_row_us, geometry, predict_row, read_rows
from dcpmla.planning.weights import ModelSize

_NUM_RIDGES = 33  # tried between the smallest and the largest FLOPs a byte that was measured
_SMALLEST_SCALE = 0.01  # of a collective's latency or transfer


def load_machine(layers: str, model: ModelSize) -> Machine:
    """A machine from a list separated by commas: presets and JSON files, each changing what stands before it.

    A file is a machine's numbers (over the preset h200x8 if it comes first) or a benchmark's rows, to which the
    machine is fitted.

    Args:
        model: whose layers the benchmark may have measured.
    Raises:
        ValueError: neither preset nor file, or a file that is neither of the two.
    """
    machine = H200X8
    for layer in layers.split(","):
        if layer in PRESETS:
            machine = PRESETS[layer]
        elif not os.path.isfile(layer):  # False, too, for a name that no file can have
            raise ValueError(f"machine (--machine) is {layer!r}; choose a preset ({', '.join(PRESETS)}) or a JSON file")
        elif "rows" in (content := read_json(Path(layer), "machine (--machine)")):
            machine = calibrate(machine, model, read_rows(content, layer))
        else:
            machine = change_machine(machine, content, Path(layer).stem)
    return machine


def calibrate(machine: Machine, model: ModelSize, rows: Sequence[Row]) -> Machine:
    """The machine fitted to checked rows (`read_rows`) of one node, as far as they go; its name says how far.

    Collectives and `direct`: latency and bandwidth scaled to rows of exchange operations. Attention: overhead, read
    rate and TFLOP/s from rows of a stack's part "attention". Layers, if predicted (`predict_row`): what a stack's total
    has beyond
    attention and the prediction.

    Raises:
        ValueError: no row speaks of any of them.
    """
    rows = [row for row in rows if row.get("num_nodes", 1) == 1]
    found: list[str] = []
    fitted = machine
    for name, fit in (("exchange", _fit_exchange), ("attention", _fit_attention), ("layers", _fit_layers)):
        if (better := fit(fitted, model, rows)) is not None:
            fitted = better
            found.append(name)
    if not found:
        raise ValueError(
            "machine (--machine): the benchmark has no rows of one node to calibrate by: gather_heads, combine of a2a or direct, "
            "or a stack of layers"
        )
    return replace(fitted, name=f"{machine.name}, calibrated ({', '.join(found)})")


def _fit_exchange(machine: Machine, model: ModelSize, rows: Sequence[Row]) -> Machine | None:
    fitted = machine
    for kind in ("all_gather", "all_to_all", "direct"):
        of_kind = [row for row in rows if _kind(row) == kind and predict_row(machine, model, row)]
        if not of_kind:
            continue
        scales = _scales(machine, kind, of_kind)
        fitted = _scaled(fitted, kind, *scales)
        if (
            kind == "all_gather"
        ):  # nothing measures a reduce-scatter alone: it is taken to change as the all-gather does
            fitted = _scaled(fitted, "reduce_scatter", *scales)
    return None if fitted == machine else fitted


def _scales(machine: Machine, kind: str, rows: Sequence[Row]) -> tuple[float, float]:
    """Of latency and transfer, by least relative squares: a prediction is linear in them, so three of a row tell its
    coefficients.
    """
    now, latency, transfer = (
        np.array([exchange_row_us(_scaled(machine, kind, *scales), row) for row in rows])
        for scales in ((1, 1), (2, 1), (1, 2))
    )
    measured = np.array([row["median_us"] for row in rows])
    coefficients = np.stack([latency - now, transfer - now], 1)
    fixed = now - coefficients.sum(1)
    scales, *_ = np.linalg.lstsq(coefficients / measured[:, None], 1 - fixed / measured, rcond=None)
    if min(scales) <= 0:  # too few sizes to tell them apart
        scales = np.full(2, max(_SMALLEST_SCALE, float(np.median((measured - fixed) / coefficients.sum(1)))))
    return float(scales[0]), float(scales[1])


def _scaled(machine: Machine, kind: str, latency: float, transfer: float) -> Machine:
    return replace(machine, **{kind: getattr(machine, kind).scaled(latency, transfer)})


def _kind(row: Row) -> str | None:
    return exchange_kind(row["operation"], row.get("backend", "a2a")) if row.get("operation") in EXCHANGES else None


def _fit_attention(machine: Machine, _: ModelSize, rows: Sequence[Row]) -> Machine | None:
    """Least relative squares of overhead + max(bytes / read rate, FLOPs / rate).

    That is linear once the ridge is known, the FLOPs a byte where both are equal; some between the measured ones
    are tried.
    """
    rows = [
        row
        for row in rows
        if row.get("part") == "attention" and "num_layers" in row and row.get("kv_cache_dtype", "bf16") == "bf16"
    ]
    if not rows:
        return None
    measured = np.array([row["median_us"] / row["num_layers"] for row in rows])
    num_bytes, flops = np.array([_attention_work(row) for row in rows]).T
    intensities = flops / num_bytes
    ridges = [*np.geomspace(intensities.min(), intensities.max(), _NUM_RIDGES)]
    fits = [(_line(np.maximum(num_bytes, flops / ridge), measured), ridge) for ridge in ridges]
    (_residual, overhead, us_per_byte), ridge = min(fits)
    gb_per_s = 1 / us_per_byte / 1e3
    return replace(
        machine,
        attention_overhead_us=overhead,
        attention_read_share=min(1.0, gb_per_s / machine.hbm_gb_per_s),
        attention_tflops=float(gb_per_s * ridge / 1e3),
    )


def _attention_work(row: Row) -> tuple[float, float]:
    """Bytes that a layer's attention reads on one rank, and its operations."""
    num_heads, query_dim, latent_dim = geometry(row)
    num_tokens = row["batch"] * -(-row["context"] // row["dcp"])
    return 2.0 * num_tokens * query_dim, 2.0 * num_tokens * (num_heads / row["tp"] * row["dcp"]) * (
        query_dim + latent_dim
    )


def _line(work: Any, measured: Any) -> tuple[float, float, float]:
    """(residual, offset, slope) of measured = offset + slope x work, both at least 0, by least relative squares."""
    both = np.stack([np.ones_like(work), work], 1) / measured[:, None]
    (offset, slope), *_ = np.linalg.lstsq(both, np.ones_like(measured), rcond=None)
    if offset < 0 or slope <= 0 or len(set(work)) == 1:
        relative = work / measured
        offset, slope = 0.0, relative.sum() / (relative**2).sum()
    residual = float(((both @ (offset, slope) - 1) ** 2).sum())
    return residual, float(offset), float(slope)


def _fit_layers(machine: Machine, model: ModelSize, rows: Sequence[Row]) -> Machine | None:
    """The median of what totals have beyond their attention (measured, else predicted) and the rest of their
    prediction.
    """
    parts = [row for row in rows if "num_layers" in row and row.get("part") in ("total", "attention")]
    stacks = [row for row in parts if predict_row(machine, model, row) is not None]
    attention = {_load(row): row["median_us"] for row in stacks if row["part"] == "attention"}
    beyond = []
    for row in (row for row in stacks if row["part"] == "total"):
        total, part = (predict_row(machine, model, {**row, "part": name}) or 0.0 for name in ("total", "attention"))
        others = row["median_us"] - attention.get(_load(row), part)
        beyond.append((others - (total - part)) / row["num_layers"])
    return replace(machine, layer_us=max(0.0, machine.layer_us + float(median(beyond)))) if beyond else None


def _load(row: Row) -> tuple[Any, ...]:
    return tuple(
        row.get(key) for key in ("tp", "dcp", "dcp_comm_backend", "num_layers", "batch", "context", "kv_cache_dtype")
    )
