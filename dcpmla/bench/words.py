"""Fields of rows in words: names of cases and of lines in plots, times and ratios in the units of readers."""

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

from dcpmla.bench.results import Row

_VALUES = "operation exchange variant kernel part layer_kind route mode geometry weights quantization"
_LABELS = dict.fromkeys(_VALUES.split(), "{}") | {  # of fields that are not shown as "name value"
    "kv_cache_dtype": "{} cache",
    "decode_query_dtype": "{} queries",
    "index_cache_dtype": "{} index cache",
    "topk": "top {:,}",
    "acceptance": "{:.0%} of drafts accepted",
    "is_adaptive": "where they pay",
    **dict.fromkeys(("rank", "is_shared"), ""),  # other fields say the same
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
    "*error": "{name} error {value:.2g}",
    "different": "different {value:.2g}",
    "is_chosen": "chosen",
}
_COMPARED = ("floor_share", "scaling_efficiency", "speedup_over_*")


def fields_of(case: Any, is_whole: bool = True) -> Row:
    """Return the fields of a case by name. The fields of a part take the part's place.

    Args:
        is_whole: Whether fields count that have their default values.
    """
    fields: Row = {}
    if isinstance(case, tuple) and hasattr(case, "_asdict"):
        defaults = {} if is_whole else getattr(case, "_field_defaults", {})
        for name, value in case._asdict().items():
            if name not in defaults or value != defaults[name]:
                fields |= fields_of(value, is_whole) or {name: value}
    return fields


def name_of(case: Any) -> str:
    """Return a name of a case, made of the fields that differ from their defaults."""
    fields = fields_of(case, is_whole=False)
    return named(fields, fields) if fields else str(case)


def named(names: Iterable[str], row: Row) -> str:
    """Return the name of some fields of a row; older rows may lack some."""
    return ", ".join(filter(None, (_label(name, row.get(name)) for name in names)))


def _label(name: str, value: Any) -> str:
    is_plain = value == "bf16" and name.endswith("dtype")
    if value is None or value is False or is_plain or value in ("", "auto"):
        return ""
    return _LABELS.get(name, name + (" {:,}" if isinstance(value, int | float) else " {}")).format(value)


def results_of(row: Row) -> Iterator[str]:
    """Yield the results of a row in words, such as "12.1 us". Fields without a value have no words."""
    for field, value in row.items():
        if value is not None and value is not False and (pattern := _pattern_of(field)):
            yield _result(field, pattern, value)


def comparisons(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the ratios of rows in words: medians, and the least and the largest ones."""
    for field in dict.fromkeys(name for row in rows for name in row):
        values = [row[field] for row in rows if row.get(field) is not None]
        if values and (pattern := _pattern_of(field)) and pattern in _COMPARED:
            least, largest = (_RESULTS[pattern].split()[0].format(value=value) for value in (min(values), max(values)))
            yield f"{_result(field, pattern, median(values))} in the median ({least} to {largest})"


def _pattern_of(field: str) -> str | None:
    return next((pattern for pattern in _RESULTS if fnmatchcase(field, pattern)), None)


def _result(field: str, pattern: str, value: Any) -> str:
    name = field.removeprefix(pattern.partition("*")[0]).removesuffix(pattern.rpartition("*")[2]).replace("_", " ")
    return " ".join(_RESULTS[pattern].format(name=name, value=value).split())
