"""vLLM with this package's attention on GPUs, where vLLM is installed: its own processes, eagerly and in full graphs of
decode, compared with its Triton attention on one GPU.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.conftest import save_model
from tests.engines.vllm_drafts import save_model_with_module
from tests.support.launchers import run_together

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
from tests.engines.vllm_drafts import DRAFTED, record_drafts
model, options = sys.argv[1], json.loads(sys.argv[2])
if "speculative_config" in options:
    record_drafts()
llm = LLM(
    model=model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024, max_num_seqs=8, max_logprobs=512,
    max_num_batched_tokens=200, gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 26,
    disable_custom_all_reduce=True, **options,
)
# The last prompt comes in chunks of 97, 196 and 7 tokens: short, long with a context, and short with a context.
prompts = [[2 + (7 * i + 3 * n) % 500 for i in range(n)] for n in (1, 5, 33, 64, 300)]
params = SamplingParams(max_tokens=16, temperature=0, detokenize=False, ignore_eos=True, logprobs=512)
outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
print(json.dumps([
    [[round(found[token].logprob, 4) for token in range(512)] for found in output.outputs[0].logprobs]
    for output in outputs
]))
print("drafted", json.dumps([[f"{name.split('-')[0]} {num_known}", drafts] for name, num_known, drafts in DRAFTED]))
"""
EAGER = {"enforce_eager": True}
GRAPHS = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
}
# Logprobs in bfloat16 differ by up to 0.12 from float32 on CPUs; without the merge they are off by 4.
TOLERANCE = 0.25
OURS, THEIRS = {"attention_backend": "CUSTOM"}, {"attention_backend": "TRITON_MLA"}
VARIABLES = {
    "PYTHONPATH": os.pathsep.join(sys.path),  # wherever vLLM is
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # Answers are greedy, and FlashInfer may be missing.
    # nothing of NVLink multicast
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_DIRECT_DCP_A2A": "0",
    "VLLM_USE_DIRECT_DCP_KV_GATHER": "0",
    "VLLM_USE_DIRECT_DCP_Q_GATHER": "0",
}


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a model whose heads are as wide as DeepSeek-V3's."""
    return save_model(tmp_path_factory.mktemp("wide"), num_heads=16, head_dim=128)


def logprobs_of(model: Path, *engines: dict[str, Any]) -> tuple[list[Tensor], list[str]]:
    """Run engines with these options at the same time: return each one's logprobs [5 prompts, 16 new tokens, 512], and
    what each one logged.
    """
    commands = [([sys.executable, "-c", PROGRAM, model, json.dumps(options)], VARIABLES) for options in engines]
    ended = run_together(commands, timeout=300)
    found = [next(line for line in each.stdout.splitlines() if line.startswith("[[[")) for each in ended]
    return [torch.tensor(json.loads(line)) for line in found], [each.stdout + each.stderr for each in ended]


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of logprobs up to where greedy tokens part: from there on contexts differ."""
    worst, num_compared = 0.0, 0
    for left, right in zip(ours, theirs, strict=True):
        same = (left.argmax(-1) == right.argmax(-1)).cumprod(0)
        num = min(int(same.sum()) + 1, len(same))
        worst, num_compared = max(worst, float((left - right)[:num].abs().max())), num_compared + num
    assert num_compared >= 40, f"only {num_compared} of 80 tokens follow the same context"
    return worst


@pytest.mark.gpu
@pytest.mark.parametrize(("cache", "tolerance"), [("auto", TOLERANCE), ("fp8", 4 * TOLERANCE)])
def test_one_gpu(wide_model: Path, cache: str, tolerance: float) -> None:
    layouts = EAGER | THEIRS, EAGER | OURS, GRAPHS | OURS
    (theirs, *ours), _ = logprobs_of(wide_model, *(each | {"kv_cache_dtype": cache} for each in layouts))
    differences = [largest_difference(each, theirs) for each in ours]
    assert max(differences) < tolerance, differences


@pytest.mark.gpu
def test_drafts_of_a_module(tmp_path: Path) -> None:
    """Four drafts a step by an MTP module, those after the first in one graph: the same drafts as eagerly."""
    model = save_model_with_module(tmp_path / "model", num_heads=16, head_dim=128)
    drafts = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 4}}
    sizes = [1, 2, 4, 8, *(5 * num_reqs for num_reqs in range(1, 9))]
    graphs = {"compilation_config": GRAPHS["compilation_config"] | {"cudagraph_capture_sizes": sorted(sizes)}}
    (theirs, *ours), (_, *logs) = logprobs_of(model, EAGER | THEIRS, EAGER | OURS | drafts, graphs | OURS | drafts)
    differences = [largest_difference(each, theirs) for each in ours]
    assert max(differences) < TOLERANCE, differences
    eagerly, in_graphs = (dict(json.loads(each.split("\ndrafted ")[1].splitlines()[0])) for each in logs)
    pairs = [(row, in_graphs[point]) for point, row in eagerly.items() if point in in_graphs and row[0] >= 0]
    assert len(pairs) > 40
    assert sum(one == other for one, other in pairs) > 0.9 * len(pairs)  # Ties of logits in bfloat16 may go either way.


@pytest.mark.gpu_2
@pytest.mark.parametrize("interleave", [1, 64])
def test_two_gpus(wide_model: Path, interleave: int) -> None:
    layout = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": interleave}
    ours = [how | OURS | layout | {"block_size": 64} for how in (EAGER, GRAPHS)]
    (theirs, *results), logs = logprobs_of(wide_model, EAGER | THEIRS, *ours)
    differences = [largest_difference(each, theirs) for each in results]
    assert max(differences) < TOLERANCE, differences
    assert all("dcpmla: exchange direct" in log for log in logs[1:])
