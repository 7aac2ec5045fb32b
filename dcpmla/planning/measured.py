"""Measured rows (`{"commit", "machine", "versions", "rows"}`) beside their predictions."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from dcpmla.planning.exchange import exchange_us, has_numbers
from dcpmla.planning.machine import Machine
from dcpmla.planning.predict import PARTS, Setting, predict_step
from dcpmla.planning.weights import ModelSize

TOLERANCE = 0.3  # a prediction further off than this share is pointed out
EXCHANGES = ("gather_heads", "combine")
_SIZES = ("tp", "dcp", "num_nodes", "num_tokens", "num_layers", "batch", "context")
_OTHER_SIZES = ("num_ranks", "gpus_per_node", "num_heads", "query_dim", "latent_dim", "hidden_size")
_NAMES = ("operation", "backend", "variant", "part", "dcp_comm_backend", "kv_cache_dtype")
_EXCHANGE_NAMES = {
    "op": "operation",
    "tokens": "num_tokens",
    "heads": "num_heads",
    "row_width": "latent_dim",
    "world_size": "dcp",
}
_ROPE_DIM = 64  # that `bench exchange` adds to row_width for queries
_LARGEST = 1 << 40  # sizes and microseconds
_GEOMETRY = {"num_heads": 128, "query_dim": 576, "latent_dim": 512}  # of rows that name none: DeepSeek-V3
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """A measured row with its prediction."""

    row: Row
    measured_us: float
    predicted_us: float

    @property
    def ratio(self) -> float:
        return self.predicted_us / self.measured_us

    @property
    def subject(self) -> str:
        """What was measured, without its sizes."""
        if "operation" in self.row:
            return " ".join(str(self.row[key]) for key in ("backend", "variant", "operation") if self.row.get(key))
        return f"part {self.row['part']}"


def read_rows(content: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The measured rows of a benchmark file, the ranks that its "machine" counts ("4 x ...") in each that names none.

    Rows of `bench exchange` come back in the names of the others (`predict_row`).

    Raises:
        ValueError: no rows, or rows without the numbers that they must have (`predict_row`).
    """
    rows = content.get("rows")
    counted = re.match(r"(\d{1,9}) x ", str(content.get("machine")))
    default = {"dcp": int(counted[1])} if counted else {}
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{name} has no list of rows; it must be the JSON file of a benchmark")
    measured = [
        {**default, **_renamed(row)} for row in rows if row.get("kind", "measured") == "measured" and "median_us" in row
    ]
    if not measured:
        raise ValueError(f"{name} has no measured rows with a median_us")
    for row in measured:
        _check_row(row, name)
    return measured


def _renamed(row: Row) -> Row:
    """A row of `bench exchange` ("op") without what it has none of; another as it is."""
    if "op" not in row:
        return row
    renamed = {_EXCHANGE_NAMES.get(key, key): value for key, value in row.items() if value is not None}
    width = renamed.get("latent_dim")
    return {**renamed, "query_dim": width + _ROPE_DIM} if isinstance(width, int) else renamed


def _check_row(row: Row, name: str) -> None:
    """Raise ValueError unless a row has the names and sizes that its prediction needs."""

    def fail(problem: object) -> ValueError:
        return ValueError(f"{name} has a row with {problem}: {str(dict(row))[:200]}")

    time = row["median_us"]
    if not isinstance(time, int | float) or isinstance(time, bool) or not 0 < time <= _LARGEST:
        raise fail(f"median_us {time!r}, which must be a number above 0")
    for key in (key for key in _NAMES if key in row and not isinstance(row[key], str)):
        raise fail(f"{key} {row[key]!r}, which must be a name")
    for key in (key for key in (*_SIZES, *_OTHER_SIZES) if key in row):
        if type(row[key]) is not int or not 1 <= row[key] <= _LARGEST:
            raise fail(f"{key} {row[key]!r}, which must be a whole number in [1, {_LARGEST}]")
    missing = [key for key in _needed(row) if key not in row]
    if missing:
        raise fail(f"no {' and no '.join(missing)}")
    if "tp" in row and "dcp" in row:
        try:
            _setting(row)
        except ValueError as error:
            raise fail(error) from error


def _needed(row: Row) -> tuple[str, ...]:
    """The sizes without which a row cannot be predicted; none of a row that nothing here predicts."""
    if row.get("part") in ("total", *PARTS):
        return ("tp", "dcp", "batch", "context")
    if row.get("operation") == "all_reduce":
        return ("dcp", "num_tokens", "hidden_size")
    return ("dcp", "num_tokens") if row.get("operation") in EXCHANGES else ()


def compare(machine: Machine, model: ModelSize, rows: Sequence[Row]) -> list[Comparison]:
    """The rows that a prediction exists for: exchange operations, and parts of a step or of a stack of layers."""
    pairs = [(row, predict_row(machine, model, row)) for row in rows]
    return [Comparison(row, float(row["median_us"]), predicted) for row, predicted in pairs if predicted]


def predict_row(machine: Machine, model: ModelSize, row: Row) -> float | None:
    """Microseconds of what a row measures; None if nothing here predicts it, or if it measures layers of another model.

    Rows of exchange operations name operation, num_tokens, dcp (all_reduce: hidden_size), and unless they are
    DeepSeek-V3's the sizes of `_GEOMETRY`; rows of a step name part ("total" or one of PARTS), tp, dcp, batch, context,
    and with num_layers
    speak of a stack of so many attention layers alone. num_ranks and gpus_per_node are those of the job that measured.
    A row of an
    operation that names no backend is of "a2a", a row of a step that names no dcp_comm_backend of "auto". Predicted
    variants: operations
    "pbm", of narrower rows.
    Steps with e4m3 queries are not predicted: they gather half the bytes, and multiply at a rate that the machine
        does not have.
    """
    if row.get("operation") == "all_reduce":
        return machine.all_reduce_us(row["num_tokens"] * row["hidden_size"] * 2, row["dcp"], row.get("num_nodes", 1))
    if (
        row.get("operation") in EXCHANGES
        and row.get("variant") != "fp8"
        and has_numbers(machine, row.get("backend", "a2a"))
    ):
        return exchange_row_us(machine, row)
    if (
        row.get("part") in ("total", *PARTS)
        and not row.get("variant")
        and row.get("decode_query_dtype") != "fp8"
        and _is_of_model(model, row)
    ):
        return _part_us(machine, model, row)
    return None


def summarize(comparisons: Sequence[Comparison]) -> list[str]:
    """A line on each subject, and one on each row that is off by more than TOLERANCE."""
    lines = []
    for subject in dict.fromkeys(comparison.subject for comparison in comparisons):
        ratios = [comparison.ratio for comparison in comparisons if comparison.subject == subject]
        lines.append(
            f"{subject}: predicted is {min(ratios):.2f} to {max(ratios):.2f} x measured, median {median(ratios):.2f} ({len(ratios)} rows)"
        )
    for comparison in comparisons:
        if not 1 / (1 + TOLERANCE) <= comparison.ratio <= 1 + TOLERANCE:
            sizes = ", ".join(f"{key} {comparison.row[key]}" for key in _SIZES if key in comparison.row)
            times = f"predicted {comparison.predicted_us:.1f} us, measured {comparison.measured_us:.1f} us"
            lines.append(f"differs: {comparison.subject} ({sizes}): {times}")
    return lines


def geometry(row: Row) -> tuple[int, int, int]:
    """Heads of the layer (of the DCP group, in rows of an exchange), width of a cache row, width of the latent."""
    sizes = {**_GEOMETRY, **row}
    return sizes["num_heads"], sizes["query_dim"], sizes["latent_dim"]


def _is_of_model(model: ModelSize, row: Row) -> bool:
    attention = model.attention
    return (
        geometry(row) == (attention.num_heads, attention.latent_dim, attention.kv_lora_rank)
        and attention.num_heads % row["tp"] == 0
    )


def exchange_row_us(machine: Machine, row: Row) -> float:
    """Microseconds of a row of `gather_heads` or `combine`."""
    num_heads, query_dim, latent_dim = geometry(row)
    width = query_dim if row["operation"] == "gather_heads" else latent_dim
    nodes, backend = row.get("num_nodes", 1), row.get("backend", "a2a")
    return exchange_us(machine, row["operation"], row["num_tokens"], num_heads, width, row["dcp"], nodes, backend)


def _setting(row: Row) -> Setting:
    return Setting(
        tp=row["tp"], dcp=row["dcp"], kv_cache_dtype=row.get("kv_cache_dtype", "bf16"), num_gpus=row.get("num_ranks")
    )


def _part_us(machine: Machine, model: ModelSize, row: Row) -> float | None:
    machine = replace(machine, gpus_per_node=row.get("gpus_per_node", machine.gpus_per_node))
    backend = row.get("dcp_comm_backend", "auto")
    if row["dcp"] > 1 and backend != "auto" and not has_numbers(machine, backend):
        return None
    load = _setting(row), row["batch"], row["context"], backend
    if "num_layers" not in row:
        return predict_step(machine, model, *load)[row["part"]]
    stack = predict_step(machine, model.attention_stack(), *load)
    return stack[row["part"]] * row["num_layers"] / model.num_attention_layers
