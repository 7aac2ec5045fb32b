"""Models that tests run in SGLang's own engine on CPUs, the engine's options, and checks of its answers."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.engines.sglang_tree import CPU, VERSION, sglang_variables
from tests.support.launchers import environment
from tests.support.oracle import Oracle

NUM_NEW, CHUNK = 6, 160
CONFIG = transformers.DeepseekV3Config(
    vocab_size=192,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    first_k_dense_replace=2,  # SGLang's experts need its compiled kernels
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=24,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    max_position_embeddings=512,
    initializer_range=0.2,
    bos_token_id=0,
    eos_token_id=191,
    rope_parameters={  # the only RoPE for MLA that SGLang has on CPUs
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
)
ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "dcpmla",
    "tp_size": 2,
    "dcp_size": 2,
    "chunked_prefill_size": CHUNK,
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.05,
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "grammar_backend": "none",
    "log_level": "warning",
}


def check_answers(
    model: Any, batches: list[list[list[int]]], served: list[list[dict[str, Any]]]
) -> dict[tuple[int, ...], list[int]]:
    """Check that SGLang's tokens and logprobs are transformers'; return all tokens of each prompt and its answer."""
    answers, oracle = {}, Oracle(model)
    for prompts, requests in zip(batches, served, strict=True):
        for prompt, request in zip(prompts, requests, strict=True):
            logprobs = oracle.logits(prompt, request["tokens"]).log_softmax(-1)
            oracle.check_tokens(prompt, request["tokens"])
            assert len(request["tokens"]) == NUM_NEW
            torch.testing.assert_close(torch.tensor(request["logprobs"]), logprobs.amax(-1), atol=1e-4, rtol=0)
            answers[tuple(prompt)] = prompt + request["tokens"]
    return answers


def launch(
    program: str, where: Path, job: dict[str, Any], release: str = VERSION, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of `sglang_cpu` on a job; its result is in `result.json`, and calls of our functions in `calls`."""
    job_file, result, calls = (where / name for name in ("job.json", "result.json", "calls"))
    calls.touch()
    job_file.write_text(json.dumps(job))
    env = environment() | sglang_variables(where / "site", release) | {"SGLANG_TEST_CALLS": str(calls)} | variables
    command = [sys.executable, str(CPU / program), str(job_file), str(result)]
    return subprocess.run(command, env=env, cwd=where, capture_output=True, text=True, timeout=500, check=False)


def serve(
    directory: Path,
    where: Path,
    batches: list[list[list[int]]],
    options: dict[str, Any],
    release: str = VERSION,
    **variables: str,
) -> tuple[list[list[dict[str, Any]]], Counter[str], Counter[str]]:
    """Return what SGLang generates for batches of prompts, and how often our functions were called on a rank for them,
    and before.
    """
    engine, result = ENGINE | {"model_path": str(directory)} | options, where / "result.json"
    job = {"engine": engine, "batches": batches, "max_new_tokens": NUM_NEW}
    done = launch("serve.py", where, job, release, **variables)
    assert result.is_file(), done.stdout[-2000:] + done.stderr[-6000:]
    before, after = (
        Counter({name: number // 2 for name, number in Counter(part.split()).items()})
        for part in (where / "calls").read_text().split("started")
    )
    return json.loads(result.read_text()), after, before
