"""vLLM with this package's attention on GPUs, where vLLM is installed: the same tokens eagerly and in full graphs, from
our backend and from vLLM's own.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.launchers import run_together

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
model, options = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(
    model=model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024, max_num_seqs=8,
    gpu_memory_utilization=0.3, disable_custom_all_reduce=True, max_num_batched_tokens=128, **options,
)
prompts = [[2 + (7 * i + 3 * n) % 500 for i in range(n)] for n in (1, 5, 33, 64, 300)]
params = SamplingParams(max_tokens=16, temperature=0, detokenize=False, ignore_eos=True, logprobs=1)
outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
print(json.dumps([[[*each.values()][0].logprob for each in output.outputs[0].logprobs] for output in outputs]))
"""
EAGER = {"enforce_eager": True}
GRAPHS = {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}
OURS, THEIRS = {"attention_backend": "CUSTOM"}, {"attention_backend": "TRITON_MLA"}
NO_MULTICAST = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "NCCL_NVLS_ENABLE": "0", "VLLM_USE_DIRECT_DCP_KV_GATHER": "0"}


def first_logprobs(model: Path, **options: object) -> list[float]:
    """Return the logprob of each prompt's first new token: later ones follow tokens that bfloat16 may change."""
    command = [sys.executable, "-c", PROGRAM, model, json.dumps(options)]
    variables = NO_MULTICAST | {"PYTHONPATH": os.pathsep.join(sys.path)}  # wherever vLLM is
    (ended,) = run_together([(command, variables)], timeout=500)
    return [each[0] for each in json.loads(ended.stdout.splitlines()[-1])]


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_one_gpu(model: Path, cache: str) -> None:
    theirs = first_logprobs(model, kv_cache_dtype=cache, **EAGER, **THEIRS)
    for how in (EAGER, GRAPHS):
        ours = first_logprobs(model, kv_cache_dtype=cache, **how, **OURS)
        assert ours == pytest.approx(theirs, abs=0.05)


@pytest.mark.gpu_2
@pytest.mark.parametrize("interleave", [1, 64])
def test_two_gpus(model: Path, interleave: int) -> None:
    layout = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": interleave}
    theirs = first_logprobs(model, **EAGER, **THEIRS)
    for how in (EAGER, GRAPHS):
        ours = first_logprobs(model, block_size=64, **layout, **how, **OURS)
        assert ours == pytest.approx(theirs, abs=0.05)
