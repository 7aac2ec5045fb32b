"""Write docs/support.md from recorded runs of tests: which family has run with which feature, and where.

python launch/write_support.py            writes the page from launch/tested_gpus.json
python launch/write_support.py --check    ends with 1 if the page differs from the record
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from features import FEATURES, REFUSED, Shown

ROOT = Path(__file__).resolve().parents[1]
RECORD, PAGE = ROOT / "launch" / "tested_gpus.json", ROOT / "docs" / "support.md"
# Rows of the table, with the model types whose tests count. Kimi-K3's text has Kimi Linear's type.
ROWS = {
    "DeepSeek-V2": ("deepseek_v2",),
    "DeepSeek-V3, R1, Kimi-K2": ("deepseek_v3", "kimi_k2"),
    "DeepSeek-V3.2": ("deepseek_v32",),
    "DeepSeek-V4": ("deepseek_v4",),
    "DeepSeek-V4.1": ("deepseek_v41_text",),
    "GLM-4.7-Flash": ("glm4_moe_lite",),
    "GLM-5": ("glm_moe_dsa",),
    "GLM-5-Next": ("glm5_next_text",),
    "LongCat-Flash": ("longcat_flash",),
    "Mistral 4": ("mistral4",),
    "Mistral Large 4": ("mistral_large4_text",),
    "Youtu-LLM": ("youtu",),
    "A.X-K1": ("axk1",),
    "A.X-K2": ("axk2",),
    "Sarvam-105B": ("sarvam_mla",),
    "MiniCPM3": ("minicpm3",),
    "Kimi Linear": ("kimi_linear",),
    "Kimi-K3": ("kimi_k3",),
    "Ling": ("bailing_hybrid",),
    "HY V4, HY V4 VL": ("hy_v4", "hy_v4_vl_text"),
    "dots3": ("dots3_note", "dots3_note_text"),
}
_INTRODUCTION = """# What has run where

`launch/write_support.py` writes this page from [recorded runs](../launch/tested_gpus.json) of the tests. A test counts
for a feature if the engine or the layer that it built has shown it: a later piece of a prompt was computed, a draft was
tried, a block was loaded. Only tests that passed count. Models are tiny and random unless a test's name says otherwise.
"""
_LEGEND = """
A cell names the runs above in which the family has shown the feature: `cpu` and `engines` are on CPUs, `gpu` on one
GPU, `gpu_2` on two. `refused`: an error names the option. `no record`: none of these runs has shown it; what earlier
runs showed inside engines is in [plugging_in.md](plugging_in.md).

- chunks: a prompt in several pieces; prefix hits: blocks of an earlier request; graphs: steps as CUDA graphs, or on
  CPUs as a stand-in that replays them; host, disk: blocks loaded from there; transfers: between prefill and decode
  servers.
- Families that the transformers of a machine (column versions) does not have run on the others alone: Mistral Large 4,
  Sarvam-105B, Ling and dots3 need 5.24.
- Kimi-K3's text has Kimi Linear's model type, and counts as that inside vLLM.
"""
# Parts of `run_tests.py`, in the order of the table.
_PARTS = ("cpu", "engines", "gpu", "gpu_2", "gpu_4", "gpu_8", "engines_gpu")

Record = dict[str, Any]
# A part's name, the model type, the outcome and the tests.
Cell = list[tuple[str, str, str, Shown]]


def main() -> None:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RECORD, help="file of recorded runs")
    parser.add_argument("--page", type=Path, default=PAGE, help="page to write")
    parser.add_argument("--check", action="store_true", help="only compare the page with the record")
    args = parser.parse_args()
    text = render(read(args.record))
    if not args.check:
        args.page.write_text(text)
    elif not args.page.exists() or args.page.read_text() != text:
        sys.exit(f"{args.page} differs from {args.record}: run launch/write_support.py")


def read(record: Path) -> Record:
    """Return a record; without a file, one of no runs."""
    return json.loads(record.read_text()) if record.exists() else {"parts": {}}


def render(record: Record) -> str:
    """Return the page of a record."""
    parts = record["parts"]
    rows = {title: {name: cell_of(parts, types, name) for name in FEATURES} for title, types in ROWS.items()}
    table = [["family", *FEATURES.values()], ["---"] * (1 + len(FEATURES))]
    for title, cells in rows.items():
        table.append([f"[{title}](#{_anchor(title)})", *map(short, cells.values())])
    sections = [_INTRODUCTION, _runs(parts), "## Families\n", "\n".join(map(_line, table)) + "\n" + _LEGEND]
    sections += [_section(title, cells) for title, cells in rows.items()]
    return "\n".join(sections)


def cell_of(parts: Record, types: Sequence[str], feature: str) -> Cell:
    """Return the tests of a row and a feature in the order of the parts, refusals last."""
    found: Cell = []
    for part in filter(parts.__contains__, _PARTS):
        for family in types:
            outcomes = parts[part].get("features", {}).get(family, {}).get(feature, {})
            found += [(part, family, outcome, shown) for outcome, shown in outcomes.items()]
    return sorted(found, key=lambda each: each[2] == REFUSED)


def short(cell: Cell) -> str:
    """Return the text of a cell: refusals only where nothing has run."""
    ran = dict.fromkeys(part for part, _, outcome, _ in cell if outcome != REFUSED)
    return ", ".join(ran) or (REFUSED if cell else "no record")


def _runs(parts: Record) -> str:
    """Return the section on the recorded runs."""
    names = ["part", "commit", "date", "cards", "versions", "minutes", "passed", "failed", "skipped"]
    table = [names, ["---"] * len(names)]
    for part in _PARTS:
        if part not in parts:
            table.append([part, "no record", *[""] * (len(names) - 2)])
            continue
        run = parts[part]
        versions = ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items())
        cards = ", ".join(dict.fromkeys(run["cards"])) or "none"
        counts = (f"{run.get('seconds', 0) / 60:.0f}", run["passed"], len(run["failed"]), sum(run["skipped"].values()))
        table.append([part, run["commit"][:7], run.get("date", ""), cards, versions, *map(str, counts)])
    return "## Recorded runs\n\n" + "\n".join(map(_line, table)) + "\n"


def _section(title: str, cells: dict[str, Cell]) -> str:
    """Return a family's section: its features with the tests that ran."""
    types = ", ".join(f"`{name}`" for name in ROWS[title])
    lines = [f"## {title}", "", f"Model types: {types}.", ""]
    for feature, cell in cells.items():
        for part, family, outcome, shown in cell:
            of = f" of `{family}`" if len(ROWS[title]) > 1 else ""
            at = f"refused in {part}" if outcome == REFUSED else part
            lines.append(f"- {FEATURES[feature]}{of}, {at}: {', '.join(_tests(shown))}")
    if lines[-1] == "":
        lines.append("No test has shown a feature.")
    return "\n".join(lines) + "\n"


def _tests(shown: Shown) -> Iterator[str]:
    """Yield links to the tests of a cell, and how many more there are."""
    for test in shown["tests"]:
        file, _, name = test.partition("::")
        yield f"[{Path(file).name}](../{file}) `{name}`"
    if more := shown["count"] - len(shown["tests"]):
        yield f"{more} more"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    main()
