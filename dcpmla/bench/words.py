"""Names of cases and of lines in plots, results and ratios, made of the fields of rows, which have the same names in
result files.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

from dcpmla.bench.results import Row

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
    """Return a field in words; a name of a kernel or an operation stands for itself."""
    is_plain = value == "bf16" and name.endswith("dtype")
    if value is None or value is False or is_plain or value in ("", "auto"):
        return ""
    if isinstance(value, bool | str) and not name.endswith("dtype"):
        return name if value is True else str(value)
    return f"{name} {value}" if isinstance(value, str) else f"{name} {value:,}"


def results_of(row: Row, known: Collection[str] = ()) -> Iterator[str]:
    """Yield the results of a row in words, such as "median_us 12.1": numbers that are not whole, and what is true, but
    for known fields.
    """
    for field, value in row.items():
        if field not in known and (value is True or isinstance(value, float)):
            yield field if value is True else f"{field} {_number(value)}"


def comparisons(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the ratios of rows in words: medians, and the least and the largest ones."""
    for field in dict.fromkeys(name for row in rows for name in row):
        values = [row[field] for row in rows if row.get(field) is not None]
        if values and any(fnmatchcase(field, pattern) for pattern in _COMPARED):
            middle, least, largest = map(_number, (median(values), min(values), max(values)))
            yield f"{field} {middle} in the median ({least} to {largest})"


def _number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"
