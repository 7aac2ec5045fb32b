"""vLLM on two GPUs, where it is installed, with a rank that comes late to a step: no token of that step leaves."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engines.test_vllm_gpu import EAGER, GRAPHS, OURS, THEIRS, VARIABLES, wide_model
from tests.engines.vllm_late import LATE_STEP, TIMEOUT, write_entry_point
from tests.support.launchers import Command, run_together

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
__all__ = ["wide_model"]  # a fixture
PROGRAM = """
import json, os, sys
from pathlib import Path
from vllm import LLM, SamplingParams
model, options = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(
    model=model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256, max_num_seqs=4,
    tensor_parallel_size=2, decode_context_parallel_size=2, block_size=64, gpu_memory_utilization=0.05,
    kv_cache_memory_bytes=1 << 26, disable_custom_all_reduce=True, enable_prefix_caching=False, **options,
)
params = SamplingParams(max_tokens=16, temperature=0, detokenize=False, ignore_eos=True)
engine = llm.llm_engine

def tokens_of(name):
    tokens = []
    engine.add_request(name, {"prompt_token_ids": [3, 1, 4]}, params)
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
    except Exception as error:
        return tokens, str(error)
    return tokens, ""

sound = tokens_of("sound")
Path(os.environ["DCPMLA_TEST_GO"]).touch()
print(json.dumps([sound, tokens_of("late"), engine.vllm_config.scheduler_config.async_scheduling]), flush=True)
os._exit(0)
"""
AHEAD, IN_TURN = {"async_scheduling": True}, {"async_scheduling": False}


@pytest.mark.gpu_2
def test_no_token_of_a_late_step_leaves(wide_model: Path, tmp_path: Path) -> None:
    """Our backend and our exchange alone, eagerly and in graphs, scheduled ahead and in turn."""
    write_entry_point(tmp_path)

    def command(name: str, mode: str, options: dict[str, Any]) -> Command:
        path = os.pathsep.join((str(tmp_path), VARIABLES["PYTHONPATH"]))
        variables = {"PYTHONPATH": path, "DCPMLA_VLLM": mode, "DCPMLA_TEST_GO": str(tmp_path / name)}
        return [sys.executable, "-c", PROGRAM, wide_model, json.dumps(options)], VARIABLES | variables

    commands = [
        command("graphs", "custom", GRAPHS | OURS | AHEAD),
        command("eager", "custom", EAGER | OURS | IN_TURN),
        command("exchange", "exchange", GRAPHS | THEIRS | AHEAD),
    ]
    line = rf"failed on rank 1 of the group [0, 1]: nothing came from rank 0 for {TIMEOUT} s, in exchange "
    for ended, is_ahead in zip(run_together(commands, timeout=300), (True, False, True), strict=True):
        report = next(text for text in ended.stdout.splitlines() if text.startswith("[[["))
        (sound, no_error), (late, error), found_ahead = json.loads(report)
        assert (len(sound), no_error, found_ahead) == (16, "", is_ahead)
        assert line in error, error + ended.stderr[-3000:]
        assert late == sound[: LATE_STEP - 1]
