"""The rows that `eight_gpus.sh` has measured, compared with what is to be reached: `python benchmarks/eight_gpus.py OUT
NUM_GPUS`. Parts without rows are left out.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from dcpmla.bench.plots import select  # noqa: E402
from dcpmla.bench.results import Row  # noqa: E402

TOKENS = (1, 8, 32, 128, 256)
# us with 128 heads over eight GPUs, at these tokens: what an exchange may take, by operation and variant.
EXCHANGE = {
    ("gather_heads", ""): (4, 7.5, 16, 52, 100),
    ("combine", ""): (4.5, 8, 16, 50, 92),
    ("combine", "pbm"): (4, 5.5, 9, 18, 30),
}
ADDED = {1: 12, 8: 18, 32: 36}  # us a layer that DCP adds beside attention, by batch
BREAK_EVEN = 65536  # cached tokens from which a step under DCP is faster than without
SELECTION = 6  # times as fast as one GPU, 32 requests of 128k tokens
DRAFTS = 2.2  # times the tokens/s, 80 % of 3 drafts accepted


def report(directory: Path, num_gpus: int) -> Iterator[str]:
    """Yield a line for each thing that was measured."""
    yield from _exchange(_rows(directory, "exchange"))
    yield from _layer(_rows(directory, "layer"), num_gpus)
    yield from _sparse(_rows(directory, "sparse"), num_gpus)
    for size in (1, num_gpus):
        yield from _steps(_rows(directory, f"step_dcp{size}"), size)
    yield from _drafts(_rows(directory, "drafts"))


def _rows(directory: Path, name: str) -> list[Row]:
    path = directory / f"{name}.json"
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def _exchange(rows: Sequence[Row]) -> Iterator[str]:
    for (operation, variant), targets in EXCHANGE.items():
        for tokens, target in zip(TOKENS, targets, strict=True):
            for row in select(rows, operation=operation, variant=variant, tokens=tokens, heads=128):
                if row["exchange"] in ("direct", "vllm_direct"):
                    yield _line(f"{operation} {variant} {tokens} tokens, {row['exchange']}", row["median_us"], target)


def _layer(rows: Sequence[Row], num_gpus: int) -> Iterator[str]:
    alike = {"kv_cache_dtype": "bf16", "dcp": num_gpus, "exchange": "direct", "variant": ""}
    for batch, target in ADDED.items():
        for context in sorted({row["context"] for row in rows}):
            parts = select(rows, **alike, batch=batch, context=context)
            moved = [row["median_us"] / row["num_layers"] for row in parts if row["part"] in ("gather", "combine")]
            if moved:
                yield _line(f"gather and combine of a layer, {batch} x {context:,}", sum(moved), target)
    faster = [load for load, factor in _speedups(rows, num_gpus) if factor > 1]
    if faster:
        yield _line("cached tokens from which DCP is faster", min(faster), BREAK_EVEN, "")


def _speedups(rows: Sequence[Row], num_gpus: int) -> Iterator[tuple[int, float]]:
    """Yield cached tokens of a step, and how much faster it is under DCP."""
    totals = select(rows, part="total", kv_cache_dtype="bf16")
    for row in select(totals, dcp=num_gpus, exchange="direct", variant=""):
        for whole in select(totals, dcp=1, batch=row["batch"], context=row["context"]):
            yield row["batch"] * row["context"], whole["median_us"] / row["median_us"]


def _sparse(rows: Sequence[Row], num_gpus: int) -> Iterator[str]:
    for batch in (1, 32):
        times = {row["dcp"]: row["median_us"] for row in select(rows, operation="selection", batch=batch)}
        if {1, num_gpus} <= times.keys():
            faster, target = times[1] / times[num_gpus], SELECTION if batch == 32 else None
            yield _line(f"selection, {batch} x 131,072, times as fast as one GPU", faster, target, "")


def _steps(rows: Sequence[Row], size: int) -> Iterator[str]:
    for row in (row for row in rows if "device_us" in row):
        line = _line(f"layer of experts, dcp {size}, batch {row['batch']}", row["us_per_moe_layer"])
        yield f"{line}; clock {row['step_us'] / row['device_us']:.2f} x device"


def _drafts(rows: Sequence[Row]) -> Iterator[str]:
    plain = {row["batch"]: row["tokens_per_second"] for row in rows if "acceptance" not in row}
    for row in (row for row in rows if "acceptance" in row):
        how = "where they pay" if row["is_adaptive"] else "in every step"
        faster = row["tokens_per_second"] / plain[row["batch"]]
        yield _line(f"3 drafts {how}, 80 % accepted, batch {row['batch']}, tokens/s", faster, DRAFTS, "x")


def _line(name: str, value: float, target: Any = None, unit: str = "us") -> str:
    goal = "" if target is None else f"  (to be reached: {target:,})"
    return f"{name:<64} {value:>10,.1f} {unit}{goal}"


if __name__ == "__main__":
    print(*report(Path(sys.argv[1]), int(sys.argv[2])), sep="\n")
