"""The connector with which the benchmark inside vLLM takes contexts as cached, over vLLM's own classes."""

import json
from pathlib import Path

from tests.engines.test_vllm_names import VERSIONS
from tests.engines.trees import vllm_tree, vllm_variables
from tests.support.launchers import ROOT, run_together, torchrun


def test_contexts_are_cached_and_hold_numbers(tmp_path: Path) -> None:
    """vLLM can make the class, finds all but the last tokens cached, and zeroes no block that has been filled."""
    program = [ROOT / "tests" / "engines" / "vllm_contexts.py"]
    variables = vllm_variables(vllm_tree(VERSIONS[-1]), tmp_path)
    (ended,) = run_together([(torchrun(program, 1), variables)], timeout=200)
    report = json.loads(ended.stdout.splitlines()[-1])
    assert report["is connector"]
    assert report["has groups"]
    assert report["bytes"] == [0x30, 0x3F]
    assert report["largest"] < 1
    assert report["matched"] == [[99, False], [35, False], [0, False]]
    assert report["plain"] > 0.5
    assert report["free at once"] == [False, None]
    assert report["asked"], "the scheduler has another way to ask its connector"
    assert report["zeroed"], "the runner has another way to zero blocks"
