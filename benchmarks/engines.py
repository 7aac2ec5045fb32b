"""Compare whole engines, this package's and vLLM's, over the same requests.

Usage: `python benchmarks/engines.py ROWS.jsonl [ROWS.jsonl ...] --json benchmarks/results/MACHINE/engines.json`

Each file has the rows of one call: one JSON object for each load, engine and repeat, all measured on the same GPUs
shortly after each other. The fastest repeat counts. The script writes the project's result format and prints ratios of
engines; it compares rows of the same call alone, because GPUs of one type differ. `--plot` draws the ratios, of each
load the last call's. It needs no GPU.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from dcpmla.bench.plots import draw_bars, new_figure, save_figure  # noqa: E402
from dcpmla.bench.results import Row, add_commit_argument, write_rows  # noqa: E402

# A result's field -> the name in a measured row. Times are seconds in both.
FIELDS = {
    "engine": "engine",
    "model": "model",
    "tp": "tp",
    "dcp": "dcp",
    "load": "load",
    "num_requests": "requests",
    "output_len": "out",
    "seconds": "wall_s",
    "output_tokens_per_second": "tok_s",
    "time_to_first_token_mean": "ttft_s",
    "time_per_token_mean": "tpot_s",
    "start_seconds": "start_s",
    "import_seconds": "import_s",
}
OPTIONAL = {
    "time_to_first_token_p99": "ttft_p99_s",
    "time_to_first_token_max": "ttft_max_s",
    "inter_token_p99": "itl_p99_s",
    "inter_token_max": "itl_max_s",
    "num_cached_tokens": "cached_tokens",
    "num_preemptions": "preemptions",
    "tag": "tag",
}
LIMITS = re.compile(r"(?P<tokens>[\d,]+) tokens, (?P<requests>[\d,]+) requests(?P<caching>, prefix caching)?")
CONVERSATIONS = re.compile(
    r"\d+ conversations at (?P<rate>[\d.e+]+)/s, (?P<turns>\d+) turns, (?P<first>[\d,]+) \+ (?P<more>\d+) / \d+"
)
# Two rows had the same work if these fields have equal values.
CASE = ("call", "model", "tp", "dcp", "load", "max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching")
CASE += ("mode", "num_requests", "input_len", "output_len", "request_rate", "num_turns", "turn_len")
LOADS = {
    **{"1": "1 prompt of 1,024 tokens", "2": "32 prompts of 1,024", "3": "128 prompts of 1,024"},
    **{"4": "8 prompts of 32,768", "5": "16 prompts of 65,536", "c": "16 conversations from 8,192 on"},
    **{"6": "16 turns over 32,768 cached", "7": "1 turn over 65,536 cached", "8": "64 turns over 8,192 cached"},
}
RATIOS = {  # field -> column of the table, factor and format of a number
    "output_tokens_per_second": ("tokens/s", 1, ",.0f"),
    "time_to_first_token_mean": ("TTFT ms", 1e3, ",.1f"),
    "time_per_token_mean": ("TPOT ms", 1e3, ".2f"),
    "inter_token_p99": ("inter-token p99 ms", 1e3, ".2f"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", metavar="ROWS.jsonl", type=Path, nargs="+", help="rows of a call")
    parser.add_argument("--json", type=Path, required=True, help="result file to write")
    parser.add_argument("--plot", metavar="OUT.png", type=Path, help="draw the ratios; needs the extra plot")
    add_commit_argument(parser)
    args = parser.parse_args()
    try:
        measured = [read_rows(path) for path in args.calls]
        machine, versions = machine_of([row for rows in measured for row in rows])
        rows = [row for call, rows in enumerate(measured, 1) for row in best_rows(call, rows)]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    write_rows(args.json, rows, machine, versions, args.commit)
    print(*ratio_table(rows), sep="\n")
    if args.plot is not None and any(pairs(rows)):
        plot(args.plot, rows, machine, versions)


def read_rows(path: Path) -> list[Row]:
    """Read the measured rows of a call.

    Raises:
        ValueError: A line is no JSON object, or lacks a field, or the file has no row.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is not JSON: {error}") from None
        if missing := {*FIELDS.values(), "device", "versions", "limits", "what", "graph_sizes", "in"} - {*row}:
            raise ValueError(f"{path}:{number} lacks {', '.join(sorted(missing))}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def machine_of(rows: Sequence[Row]) -> tuple[str, dict[str, str | None]]:
    """Return the machine of measured rows and the versions of packages.

    Raises:
        ValueError: The rows are of several types of GPUs, or of several versions of a package.
    """
    devices = sorted({row["device"] for row in rows})
    if len(devices) > 1:
        raise ValueError(f"rows are of {' and '.join(devices)}; a result file holds one type of GPU")
    versions: dict[str, str | None] = {}
    for row in rows:
        for package, version in row["versions"].items():
            if versions.setdefault(package, version) != version:
                raise ValueError(f"rows are of {package} {versions[package]} and {version}; a result file holds one")
    return f"{max(row['tp'] for row in rows)} x {devices[0]}", versions


def best_rows(call: int, measured: Iterable[Row]) -> list[Row]:
    """Return the fastest repeat of each case and engine as a result row."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in (result_row(call, row) for row in measured):
        key = tuple(map(row.get, (*CASE, "engine", "exchange", "tag")))
        if key not in best or row["seconds"] < best[key]["seconds"]:
            best[key] = row
    return list(best.values())


def result_row(call: int, measured: Row) -> Row:
    """Return a measured row in the vocabulary of results.

    Raises:
        ValueError: The row's limits or its load of conversations cannot be read.
    """
    limits = match(LIMITS, "limits", measured)
    row = {"call": call, **{name: measured[source] for name, source in FIELDS.items()}}
    row |= {name: measured[source] for name, source in OPTIONAL.items() if measured.get(source) not in (None, "")}
    row |= {
        "exchange": measured.get("comm") or "none",
        "mode": "graph" if measured["graph_sizes"] else "eager",
        "max_num_batched_tokens": number(limits["tokens"]),
        "max_num_seqs": number(limits["requests"]),
        "enable_prefix_caching": limits["caching"] is not None,
    }
    if measured["load"] != "c":
        return row | {"input_len": measured["in"]}
    turns = match(CONVERSATIONS, "what", measured)
    return row | {
        "input_len": number(turns["first"]),
        "turn_len": number(turns["more"]),
        "num_turns": number(turns["turns"]),
        "request_rate": float(turns["rate"]),
    }


def match(pattern: re.Pattern[str], field: str, row: Row) -> re.Match[str]:
    """Return the match of a row's whole field."""
    result = pattern.fullmatch(row[field])
    if result is None:
        raise ValueError(f"{field} is {row[field]!r}; allowed is {pattern.pattern}")
    return result


def number(text: str) -> int:
    """Return the number of a text with commas between thousands."""
    return int(text.replace(",", ""))


def pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield rows of other engines with vLLM's rows of the same work."""
    for vllm in (row for row in rows if row["engine"] == "vllm"):
        for row in (row for row in rows if row["engine"] != "vllm"):
            if all(row.get(field) == vllm.get(field) for field in CASE):
                yield row, vllm


def plot(path: Path, rows: Sequence[Row], machine: str, versions: dict[str, str | None]) -> None:
    """Draw this package's tokens/s / vLLM's and vLLM's times to the first token / this package's: a bar for each load,
    of its last call, whose number it has.

    Raises:
        ImportError: matplotlib is not installed.
    """
    measured = [(row, vllm) for row, vllm in pairs(rows) if row["engine"] == "dcpmla"]
    models = ", ".join(dict.fromkeys(row["model"] for row, _ in measured))
    last = {}  # a load's last call
    for row, vllm in measured:
        load = f"{LOADS.get(row['load'], row['load'])}, steps of {row['max_num_batched_tokens']:,}"
        last[f"{row['model']}: {load}" if "," in models else load] = row, vllm
    last = {f"{load} (call {row['call']})": (row, vllm) for load, (row, vllm) in last.items()}
    rate, delay = "output_tokens_per_second", "time_to_first_token_mean"
    speedups = {name: ours[rate] / vllm[rate] for name, (ours, vllm) in last.items()}
    delays = {name: vllm[delay] / ours[delay] for name, (ours, vllm) in last.items()}
    span = f"{min(speedups.values()):.2f} to {max(speedups.values()):.2f} x the tokens/s"
    title = f"{models}, random weights, on {machine}: {span} of vLLM {versions.get('vllm')}"
    figure, axes = new_figure(title, 2, width=5.6)
    draw_bars(axes[0], speedups, "tokens/s, times vLLM's", "{:.2f}")
    draw_bars(axes[1], delays, "mean time to first token, vLLM's over dcpmla's", "{:.2f}")
    for axis in axes:
        axis.axvline(1, color="black", linewidth=1)
    axes[1].set_yticklabels([])
    save_figure(path, figure)


def ratio_table(rows: Sequence[Row]) -> list[str]:
    """Return a table of other engines' numbers / vLLM's numbers, one line for each pair that had the same work."""
    columns = (column for column, *_ in RATIOS.values())
    header = ["call", "model", "tp x dcp", "load", "step's tokens", "engines", *columns]
    table = [header, ["---"] * len(header)]
    for row, vllm in pairs(rows):
        case = [row["call"], row["model"], f"{row['tp']} x {row['dcp']}", row["load"]]
        case += [f"{row['max_num_batched_tokens']:,}", f"{engine_name(row)} / {engine_name(vllm)}"]
        table.append([*map(str, case), *(ratio(row, vllm, field) for field in RATIOS)])
    if len(table) == 2:
        return ["no load has rows of both engines from one call"]
    return [f"| {' | '.join(cells)} |" for cells in table]


def engine_name(row: Row) -> str:
    """Return an engine's name with its exchange and the run's tag."""
    exchange = row["exchange"] if row["dcp"] > 1 else ""
    details = ", ".join(filter(None, [exchange, row.get("tag")]))
    return f"{row['engine']} ({details})" if details else row["engine"]


def ratio(row: Row, vllm: Row, field: str) -> str:
    """Return the ratio of two rows' numbers with both; a dash if one has none."""
    one, other = row.get(field), vllm.get(field)
    if not one or not other:
        return "-"
    _, factor, form = RATIOS[field]
    return f"{one / other:.2f} ({one * factor:{form}} / {other * factor:{form}})"


if __name__ == "__main__":
    main()
