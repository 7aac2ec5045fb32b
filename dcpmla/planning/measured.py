"""Rows of `bench layer`, `bench exchange` and `bench generate`, their predictions, and a machine fitted to them."""

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from dcpmla.planning.deployment import Deployment
from dcpmla.planning.exchange import ExchangeCosts, has_numbers
from dcpmla.planning.machine import COLLECTIVES, H200X8, Machine, change_machine, read_json
from dcpmla.planning.setting import Setting
from dcpmla.planning.weights import ModelSize

Row = dict[str, Any]
_PARTS = ("total", "gather", "attention", "combine")  # parts that mean the same in benchmarks and in the planner
_SIZES = ("tp", "dcp", "gpus_per_node", "tokens", "heads", "row_width", "num_layers", "batch", "context", "input_len")
# Options that the planner does not model.
_UNPLANNED = ("dcp_q_replicate", "dcp_project_before_merge", "acceptance", "acceptance_length")
_FITTED = (  # numbers of a machine: group or "", name
    *(("direct", name) for name in ("gather_us", "combine_us", "gb_per_s")),
    *((kind, name) for kind in COLLECTIVES for name in ("overhead_us", "per_rank_us", "gb_per_s")),
    *(("", name) for name in ("attention_overhead_us", "attention_read_share", "attention_tflops", "layer_us")),
)
_FITTED_TO_STEPS = tuple(("", name) for name in ("product_us", "product_read_share", "packed_read_share"))
_STEP, _NUM_STEPS = 1e-3, 20  # difference and iterations of Gauss-Newton on the logarithms of factors


def predict_row(machine: Machine, model: ModelSize, row: Row) -> float | None:
    """Return the microseconds predicted for a row; None where the planner predicts none, as for other models' rows."""
    if "gpus_per_node" in row:
        machine = replace(machine, gpus_per_node=row["gpus_per_node"])
    if row.get("operation") in ("gather_heads", "combine"):
        if row["variant"] == "fp8" or not has_numbers(machine, row["exchange"]):
            return None
        exchange = ExchangeCosts(machine, row["dcp"], machine.num_nodes(row["dcp"], row["tp"]), row["exchange"])
        return exchange.time_us(*(row[name] for name in ("operation", "tokens", "heads", "row_width")))
    if "device_us" in row:
        return _predict_step(machine, model, row)
    if row.get("part") not in _PARTS or row["variant"] or row.get("decode_query_dtype") == "fp8":
        return None
    stack = model.attention_stack
    if stack is None or row.get("layer_kind", "mla") != "mla":
        return None
    config = stack.attention.config
    is_of_model = (config.num_heads, config.latent_dim) == (row["heads"], row["query_dim"])
    if not is_of_model or (row["dcp"] > 1 and not has_numbers(machine, row["exchange"])):
        return None
    setting = Setting(tp=row["tp"], dcp=row["dcp"], kv_cache_dtype=row["kv_cache_dtype"])
    step = Deployment(machine, stack, setting, row["exchange"]).step_us(row["batch"], row["context"])
    return step[row["part"]] * row["num_layers"] / stack.attention.num_layers


def measured_us(row: Row) -> float:
    """Return the microseconds that a row with a prediction was measured at; for a model's step, on the device."""
    time_us: float = row["median_us"] if "median_us" in row else row["device_us"]
    return time_us


def _predict_step(machine: Machine, model: ModelSize, row: Row) -> float | None:
    """Return the microseconds predicted for a decode step of a whole model; None for another model, by its number of
    parameters, and for options that the planner does not model.
    """
    if row.get("num_parameters") != model.num_parameters or row.get("decode_query_dtype") == "fp8":
        return None
    if any(row.get(name) for name in _UNPLANNED) or (row["dcp"] > 1 and not has_numbers(machine, row["exchange"])):
        return None
    names = ("tp", "dcp", "kv_cache_dtype", "index_cache_dtype", "enable_expert_parallel")
    setting = Setting(**{name: row[name] for name in names})
    return Deployment(machine, model, setting, row["exchange"]).step_us(row["batch"], row["input_len"])["total"]


def read_rows(path: Path, option: str, model: ModelSize) -> list[Row]:
    """Return the rows of a result file.

    Raises:
        ValueError: No such file, no rows in it, or a row without needed sizes; the message names the option.
    """
    rows = read_json(path, option).get("rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(
            f"{option} is {path}, which has no list of rows; give one of bench layer, exchange or generate"
        )
    for row in rows:
        try:
            predicted = predict_row(H200X8, model, row)
            sizes = [row[name] for name in _SIZES if row.get(name) is not None]
            is_right = predicted is None or (
                all(type(size) is int and size > 0 for size in sizes) and 0 < measured_us(row) < inf > predicted
            )
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{option} is {path}, which has a bad row ({error!r}): {str(row)[:200]}") from error
        if not is_right:
            raise ValueError(f"{option} is {path}, which has a row of impossible sizes or time: {str(row)[:200]}")
    return rows


def calibrate(machine: Machine, model: ModelSize, rows: list[Row]) -> Machine:
    """Return the machine whose predictions meet the rows of one node best, by least relative squares.

    Rows over quantized caches do not count. Numbers that no row depends on stay, and the numbers of matrix products
    stay unless there are steps of whole models. Numbers that rows cannot distinguish change alike.

    Raises:
        ValueError: The planner predicts none of the rows.
    """
    rows = [row for row in rows if predict_row(machine, model, row) and row.get("kv_cache_dtype", "bf16") == "bf16"]
    rows = [row for row in rows if row["tp"] <= row.get("gpus_per_node", machine.gpus_per_node)]
    if not rows:
        raise ValueError("machine (--machine): no row of one node can be predicted, so nothing calibrates the machine")
    fitted = _FITTED + (_FITTED_TO_STEPS if any("device_us" in row for row in rows) else ())
    numbers = [(group, name) for group, name in fitted if not group or getattr(machine, group)]
    logs, measured = np.zeros(len(numbers)), np.array([measured_us(row) for row in rows])

    def scaled(logs: np.ndarray) -> Machine:
        changes: dict[str, Any] = {}
        for (group, name), factor in zip(numbers, np.exp(logs).tolist(), strict=True):
            value = getattr(getattr(machine, group) if group else machine, name) * factor
            (changes.setdefault(group, {}) if group else changes)[name] = min(value, 1.0) if "share" in name else value
        return change_machine(machine, changes, f"{machine.name}, calibrated")

    def ratios(logs: np.ndarray) -> np.ndarray:
        at = scaled(logs)
        return np.array([predict_row(at, model, row) for row in rows]) / measured

    for _ in range(_NUM_STEPS):
        now = ratios(logs)
        # Backwards: a share of 1 cannot grow.
        slopes = np.stack([(now - ratios(logs - _STEP * one)) / _STEP for one in np.eye(len(numbers))], 1)
        logs += np.linalg.lstsq(slopes, 1 - now, rcond=1e-3)[0].clip(-1, 1)
    return scaled(logs)
