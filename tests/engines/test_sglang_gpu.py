"""SGLang with this package's attention on two GPUs, where SGLang is installed: its own processes, eagerly and in graphs
of decode, compared with transformers in float32.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engines.sglang_tree import CPU, DRAFTS, for_sglang, prompts_of
from tests.engines.vllm_drafts import save_model_with_module
from tests.support.launchers import Command, run_together

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
NUM_NEW = 16
ENGINE = {
    "dtype": "bfloat16",
    "attention_backend": "dcpmla",
    "tp_size": 2,
    "dcp_size": 2,
    "chunked_prefill_size": 192,
    "max_total_tokens": 8192,
    "max_running_requests": 8,
    "mem_fraction_static": 0.1,
    "sampling_backend": "pytorch",
    "disable_custom_all_reduce": True,
    "disable_prefill_cuda_graph": True,
    "skip_tokenizer_init": True,
    "grammar_backend": "none",
    "log_level": "info",
}
# bfloat16 changes logprobs of this model by up to 0.12, latents in e4m3 by up to 0.2; without the merge they are off
# by 4.
TOLERANCE = 0.25
VARIABLES = {
    "PYTHONPATH": os.pathsep.join(sys.path),  # wherever SGLang is
    "HF_HUB_OFFLINE": "1",
    # nothing of NVLink multicast
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a model whose heads are as wide as DeepSeek-V3's, with an MTP module of experts."""
    directory = tmp_path_factory.mktemp("wide")
    return for_sglang(save_model_with_module(directory, num_heads=16, head_dim=128, num_dense=2))


@torch.no_grad()
def largest_difference(model: Path, prompts: list[list[int]], requests: list[dict[str, Any]]) -> float:
    """Return the largest difference of the new tokens' logprobs from transformers', after the same tokens."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    worst = 0.0
    for prompt, request in zip(prompts, requests, strict=True):
        tokens = request["tokens"]
        assert len(tokens) == NUM_NEW
        logprobs = oracle(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(tokens).unsqueeze(1))[:, 0]
        worst = max(worst, float((expected - torch.tensor(request["logprobs"])).abs().max()))
    return worst


@pytest.mark.gpu_2
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"page_size": 1}, TOLERANCE),
        ({"page_size": 64}, TOLERANCE),
        ({"page_size": 64, "kv_cache_dtype": "fp8_e4m3"}, 2 * TOLERANCE),
        ({"page_size": 64, "dcp_size": 1}, TOLERANCE),
        ({"page_size": 64} | DRAFTS, TOLERANCE),
        ({"page_size": 1, "dcp_size": 1} | DRAFTS, TOLERANCE),
    ],
    ids=str,
)
def test_two_gpus(model: Path, tmp_path: Path, options: dict[str, Any], tolerance: float) -> None:
    """Prompts of few tokens and of more than attend as decodes do; the module of the last two drafts by chance."""
    prompts = prompts_of(1, 5, 33, 64, 300)

    def command(name: str, port: int, **more: Any) -> Command:
        (folder := tmp_path / name).mkdir()
        engine = ENGINE | {"model_path": str(model), "port": port} | options | more
        job = {"engine": engine, "batches": [prompts, prompts], "max_new_tokens": NUM_NEW}
        (folder / "job.json").write_text(json.dumps(job))
        argv = [sys.executable, CPU / "serve.py", folder / "job.json", folder / "result.json"]
        return argv, VARIABLES | {"SGLANG_TEST_CALLS": str(folder / "calls")}

    ways: dict[str, dict[str, Any]] = {"eager": {"disable_cuda_graph": True}, "graphs": {}}
    ended = run_together([command(name, 30000 + 1000 * i, **ways[name]) for i, name in enumerate(ways)], timeout=300)
    is_sharded = options.get("dcp_size", 2) > 1
    assert all(("dcpmla: exchange direct" in each.stdout + each.stderr) == is_sharded for each in ended)
    for name in ways:
        served = json.loads((tmp_path / name / "result.json").read_text())
        steps = [request["steps"] for requests in served for request in requests]
        assert all(steps) == ("speculative_algorithm" in options)
        differences = [largest_difference(model, prompts, requests) for requests in served]
        assert max(differences) < tolerance, (name, differences)
