"""The code that a decode step runs on CPUs, in files and lines: what a reader of a step has to open.

`python -m pytest tests/test_reading_set.py -s` prints the measured numbers.
"""

import json
import sys

import pytest

from dcpmla.cache.latent import num_blocks
from dcpmla.config import DCPConfig
from tests.support.launchers import run_together
from tests.support.trace import Trace, trace

# Limits of files, of their lines, and of lines in functions that run. Lower them when a step gets shorter.
BOUNDS = {"layer": (26, 4050, 1230), "engine": (57, 9050, 2550)}
PARTS = {
    "layer": {"attention/layer.py", "attention/build.py", "attention/decode.py", "comm/exchange.py"},
    "engine": {"attention/layer.py", "runtime/engine.py", "runtime/scheduler.py", "model/block.py"},
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_decode_step_is_short(name: str) -> None:
    (result,) = run_together([([sys.executable, "-m", "tests.support.trace", name], {})])
    step = Trace(**json.loads(result.stdout.splitlines()[-1]))
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
