"""The package's files and functions that a call runs. `python -m tests.support.trace layer` (or `chunk`, `engine`)
prints those of a step.
"""

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import dcpmla
from tests.support.dense_layer import DenseLayer, one_rank

PACKAGE = Path(dcpmla.__file__).parent
NEEDLE = PACKAGE.parent / "examples" / "needle" / "model"


@dataclass(frozen=True)
class Trace:
    """What one call runs.

    Attributes:
        files: Number of lines of each file with a function that runs, by its path in the package.
        num_functions: Number of functions that run.
        function_lines: Number of lines of all functions that run.
    """

    files: dict[str, int]
    num_functions: int
    function_lines: int


def trace(call: Callable[[], object]) -> Trace:
    """Run a call and return the files and functions of the package that run in this thread."""
    codes: set[CodeType] = set()

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            codes.add(frame.f_code)

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    files = {Path(code.co_filename) for code in codes}
    lines = {(code.co_filename, line) for code in codes for line in _lines(code)}
    sizes = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in sorted(files)}
    return Trace(sizes, len(codes), len(lines))


def _lines(code: CodeType) -> range:
    """Return the numbers of a function's lines; a nested function's are its parent's, too."""
    source, first = inspect.getsourcelines(code)
    return range(first, first + len(source))


def trace_layer() -> Trace:
    """Trace a decode step of a dense layer: `StepBuilder.build`, then `MLAAttention.forward`."""
    with one_rank():
        layer = DenseLayer()
        layer.step(0, 9)
        layer.step(9, 10)  # a first step imports and caches more
        return trace(lambda: layer.step(10, 11))


def trace_chunk() -> Trace:
    """Trace a decode step of a dense layer, and a chunk of a prompt after a context."""
    with one_rank():
        layer = DenseLayer()
        layer.step(0, 9)
        layer.step(9, 10)  # a first step imports and caches more
        return trace(lambda: (layer.step(10, 11), layer.step(6, 12)))


def trace_engine() -> Trace:
    """Trace a decode step of a whole engine."""
    with dcpmla.LLM(NEEDLE, device="cpu") as llm:
        prompt = llm.engine.prompt("amber-ant 123; amber-apple 456; amber-ant?")
        llm.engine.add(prompt, dcpmla.SamplingParams(max_new_tokens=8, ignore_eos=True), request_id=0)
        for _ in range(3):
            llm.engine.step()
        assert llm.engine.has_requests
        return trace(llm.engine.step)


if __name__ == "__main__":
    print(json.dumps(asdict({"layer": trace_layer, "chunk": trace_chunk, "engine": trace_engine}[sys.argv[1]]())))
