"""Fields of rows in words: names of cases and of lines in plots, times and ratios in the units of readers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

from dcpmla.bench.results import Row

_LABELS = {  # of fields that are not shown as "name value"
    **dict.fromkeys(("operation", "exchange", "variant", "kernel", "part", "layer_kind", "route", "mode"), "{}"),
    **dict.fromkeys(("geometry", "weights", "quantization", "engine", "load"), "{}"),
    **{"kv_cache_dtype": "{} cache", "decode_query_dtype": "{} queries", "index_cache_dtype": "{} index cache"},
    **{"topk": "top {:,}", "acceptance": "{:.0%} of drafts accepted", "is_adaptive": "where they pay"},
}
_RESULTS = {  # by patterns of fields; the first that fits
    "median_us": "{value:,.1f} us",
    "*_us": "{name} {value:,.1f} us",
    "us_per_moe_layer": "{value:,.1f} us a layer of experts",
    "*_us_per_layer": "{name} {value:,.1f} us a layer",
    "*_ms": "{name} {value:,.1f} ms",
    "tflops": "{value:,.1f} TFLOP/s",
    "index_gb_per_s": "{value:,.1f} GB/s of index keys",
    "gb_per_s": "{value:,.1f} GB/s",
    "floor_share": "{value:.0%} of the floor's speed",
    "scaling_efficiency": "{value:.0%} scaling efficiency",
    "speedup_over_*": "{value:.2f} x {name}'s speed",
    "*_per_second": "{value:,.1f} {name}/s",
    "num_fit_mean": "{value:,} fit",
    "*error": "error {name} {value:.2g}",
    "different": "different {value:.2g}",
}
_COMPARED = ("floor_share", "scaling_efficiency", "speedup_over_*")


def name_of(fields: Any) -> str:
    """Return a name of a case, or of some fields of a row: what is not the default of its field."""
    if isinstance(fields, tuple) and hasattr(fields, "_asdict"):
        fields = fields._asdict()
    if not isinstance(fields, Mapping):
        return str(fields)
    return ", ".join(filter(None, (_label(name, value) for name, value in fields.items())))


def _label(name: str, value: Any) -> str:
    is_plain = value == "bf16" and name.endswith("dtype")
    if value is None or value is False or is_plain or value in ("", "auto"):
        return ""
    if isinstance(value, tuple):
        return name_of(value)
    return _LABELS.get(name, name + (" {:,}" if isinstance(value, int | float) else " {}")).format(value)


def results_of(row: Row) -> Iterator[str]:
    """Yield the results of a row in words, those of no value left out."""
    for field, value in row.items():
        if value is not None and (pattern := _pattern_of(field)):
            yield _result(field, pattern, value)


def comparisons(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the ratios of rows in words: medians, and the least and the largest ones."""
    for field in dict.fromkeys(name for row in rows for name in row):
        values = [row[field] for row in rows if row.get(field) is not None]
        if values and (pattern := _pattern_of(field)) and pattern in _COMPARED:
            least, largest = (_RESULTS[pattern].split()[0].format(value=value) for value in (min(values), max(values)))
            yield f"{_result(field, pattern, median(values))} in the median ({least} to {largest})"


def named(fields: Iterable[str], row: Row) -> str:
    """Return the name of a row's fields; older rows may lack some."""
    return name_of({field: row.get(field) for field in fields})


def _pattern_of(field: str) -> str | None:
    return next((pattern for pattern in _RESULTS if fnmatchcase(field, pattern)), None)


def _result(field: str, pattern: str, value: Any) -> str:
    name = field.removeprefix(pattern.partition("*")[0]).removesuffix(pattern.rpartition("*")[2]).replace("_", " ")
    return " ".join(_RESULTS[pattern].format(name=name, value=value).split())
