"""benchmarks/eight_gpus.sh: its commands are ones that there are, its time is what it says; and its report."""

import re
import runpy
import shlex
import shutil
from pathlib import Path

from dcpmla.__main__ import build_parser

ROOT = Path(__file__).parents[2]
VALUES = {
    '"$n"': "8",
    '"$dcp"': "1,2,4,8",
    '"$size"': "8",
    '"1,$n"': "1,8",
    '"${model[@]}"': "--model DIR --load-format dummy -tp 8",
    "$peers": "--peers DIR",
}


def test_its_commands_are_there_and_take_eight_minutes() -> None:
    script = (ROOT / "benchmarks" / "eight_gpus.sh").read_text()
    parts = re.findall(r"^( *)(measure|part) (\S+) (\d+) (.+)$", script, re.MULTILINE)
    assert sum(int(limit) * (2 if indent else 1) for indent, _, _, limit, _ in parts) <= 480
    for _, kind, _, _, command in parts:
        for variable, value in VALUES.items():
            command = command.replace(variable, value)
        if kind == "measure":
            build_parser().parse_args(["bench", *shlex.split(command)])


def test_its_report_compares_what_is_there(tmp_path: Path) -> None:
    results = ROOT / "benchmarks" / "results" / "h200x4"
    for source, name in (("exchange", "exchange"), ("layer", "layer"), ("step", "step_dcp4")):
        shutil.copy(results / f"{source}.json", tmp_path / f"{name}.json")
    report = runpy.run_path(str(ROOT / "benchmarks" / "eight_gpus.py"))["report"]
    lines = list(report(tmp_path, 4))
    assert "  3.9 us  (to be reached: 4)" in next(line for line in lines if line.startswith("gather_heads  1 tokens"))
    assert any(line.startswith("gather and combine of a layer, 32 x 65,536") for line in lines)
    assert any("clock" in line for line in lines)
    assert list(report(tmp_path / "nothing", 8)) == []
