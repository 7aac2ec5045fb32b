"""The code that a step runs on CPUs, in files and lines: what a reader of a step has to open, and the documents list.

`python -m pytest tests/test_reading_set.py -s` prints the measured numbers.
"""

import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from dcpmla.cache.latent import num_blocks
from dcpmla.config import DCPConfig
from tests.support.launchers import run_forked
from tests.support.trace import Trace, trace

# Limits of files, of their lines, and of lines in functions that run. Lower them when a step gets shorter.
BOUNDS = {"layer": (18, 3914, 1228), "chunk": (22, 4460, 1684), "engine": (52, 9_546, 2_604)}
PARTS = {
    "layer": {"attention/mla/layer.py", "attention/step/metadata.py", "attention/mla/decode.py", "comm/exchange.py"},
    "chunk": {"attention/mla/layer.py", "attention/mla/prefill.py", "attention/step/chunks.py", "merge.py"},
    "engine": {"attention/mla/layer.py", "runtime/engine.py", "runtime/scheduler.py", "model/block.py"},
}


# Files beside the reading set: a kernel in plain torch, and rows and weights in 8 and 4 bits.
APART = {"attention/backends/reference.py", "parallel/quantized.py"}
STRUCTURE = Path(__file__).parents[1] / "docs" / "structure.md"


@cache
def traced(name: str) -> Trace:
    (result,) = run_forked([([sys.executable, "-m", "tests.support.trace", name], {})])
    return Trace(**json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", BOUNDS)
def test_a_step_is_short(name: str) -> None:
    step = traced(name)
    print(f"\n{name}: {len(step.files)} files, {sum(step.files.values())} lines")
    print(f"{step.num_functions} functions, {step.function_lines} lines")
    print("\n".join(f"{lines:6} {path}" for path, lines in step.files.items()))
    assert PARTS[name] <= step.files.keys()
    measured = len(step.files), sum(step.files.values()), step.function_lines
    assert all(number <= bound for number, bound in zip(measured, BOUNDS[name], strict=True)), measured


def test_a_trace_sees_functions_that_functions_call() -> None:
    dcp = DCPConfig()
    step = trace(lambda: num_blocks(1000, dcp))  # dcp.virtual_block_size is a property
    assert set(step.files) == {"cache/latent.py", "config.py"}
    assert step.num_functions == 2
    assert 4 <= step.function_lines <= 12
    assert trace(lambda: None).files == {}


def test_the_documents_list_the_files_of_a_step() -> None:
    """In one table, with the number of files and of lines above it."""
    section = STRUCTURE.read_text().partition("## The reading set")[2].partition("\n## ")[0]
    step = traced("chunk")
    files = {path: lines for path, lines in step.files.items() if path not in APART}
    listed = re.findall(r"^\| \d+ \| `(\S+\.py)` \|", section, re.MULTILINE)
    assert sorted(listed) == sorted(files)
    num_files, num_lines = map(int, re.findall(r"(\d+) files of ([\d,]+) lines", section.replace(",", ""))[0])
    assert num_files == len(files)
    assert sum(files.values()) <= num_lines
