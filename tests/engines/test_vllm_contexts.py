"""The connector with which the benchmark inside vLLM takes contexts as cached, over vLLM's own classes."""

import json
import sys

from tests.engines.trees import VERSIONS, vllm_tree, vllm_variables
from tests.support.launchers import ROOT, run_together


def test_contexts_are_cached_and_hold_numbers() -> None:
    """vLLM can make the class, finds all but the last tokens cached, and zeroes no block that has been filled."""
    tree = vllm_tree(VERSIONS[-1])
    command = [sys.executable, ROOT / "tests" / "engines" / "vllm_contexts.py"]
    (ended,) = run_together([(command, vllm_variables(tree))], timeout=200)
    report = json.loads(ended.stdout.splitlines()[-1])
    assert report["is connector"]
    assert report["has groups"]
    assert report["bytes"] == [0x30, 0x3F]
    assert report["largest"] < 1
    assert report["matched"] == [[99, False], [35, False], [0, False]]
    assert report["plain"] > 0.5
    assert report["free at once"] == [False, None]
    for module, used in (
        ("v1/core/sched/scheduler.py", "self.connector.get_num_new_matched_tokens("),
        ("v1/worker/gpu/model_runner.py", "self.kv_block_zeroer.zero_block_ids("),
    ):
        assert used in (tree / "vllm" / module).read_text(), f"{module} has another way"
