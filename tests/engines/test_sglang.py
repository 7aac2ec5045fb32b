"""SGLang's own engine over our backend, TP 2 x DCP 2 on CPUs: transformers' tokens and logprobs."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engines.rounded import logprobs_over_rounded_latents
from tests.engines.sglang_tree import CPU, for_sglang, prompts_of, sglang_variables
from tests.support.launchers import environment
from tests.support.models import random_model

NUM_NEW, CHUNK = 6, 64
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


# Pieces of prompts, what is cached of a prompt, many at once; the second batch finds the first one's prefixes.
MIXED, MANY = prompts_of(1, 5, 33, 150, 300), prompts_of(*range(2, 22))
BATCHES = [MIXED, MIXED, MANY]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Save a tiny model; return its directory, and transformers' model."""
    directory = tmp_path_factory.mktemp("model")
    model = random_model(CONFIG)
    model.save_pretrained(directory)
    return for_sglang(directory), model


@torch.no_grad()
def expected(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return transformers' greedy tokens and their logprobs."""
    tokens, logprobs = list(prompt), []
    for _ in range(NUM_NEW):
        logprob, token = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1).max(-1)
        tokens.append(int(token))
        logprobs.append(float(logprob))
    return tokens[len(prompt) :], logprobs


def serve(
    directory: Path, where: Path, batches: list[list[list[int]]], options: dict[str, Any], **variables: str
) -> tuple[list[list[dict[str, Any]]], Counter[str], Counter[str]]:
    """Return what SGLang generates for batches of prompts, and how often our functions were called on a rank for them,
    and before.
    """
    site, calls, job, result = (where / name for name in ("site", "calls", "job.json", "result.json"))
    calls.touch()
    engine = ENGINE | {"model_path": str(directory)} | options
    job.write_text(json.dumps({"engine": engine, "batches": batches, "max_new_tokens": NUM_NEW}))
    env = environment() | sglang_variables(site) | {"SGLANG_TEST_CALLS": str(calls)}
    command = [sys.executable, str(CPU / "serve.py"), str(job), str(result)]
    done = subprocess.run(
        command, env=env | variables, cwd=where, capture_output=True, text=True, timeout=500, check=False
    )
    assert result.is_file(), done.stdout[-2000:] + done.stderr[-6000:]
    before, after = (
        Counter({name: number // 2 for name, number in Counter(part.split()).items()})
        for part in calls.read_text().split("started")
    )
    return json.loads(result.read_text()), after, before


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_transformers_generates(model: tuple[Path, Any], tmp_path: Path, page_size: int) -> None:
    served, calls, warm_up = serve(model[0], tmp_path, BATCHES, {"page_size": page_size})
    for prompts, requests in zip(BATCHES, served, strict=True):
        for prompt, request in zip(prompts, requests, strict=True):
            tokens, logprobs = expected(model[1], prompt)
            assert request["tokens"] == tokens
            torch.testing.assert_close(request["logprobs"], logprobs, atol=1e-4, rtol=0)
    cached = [request["cached"] for request in served[1]]
    assert cached[-1] >= 300 - CHUNK > cached[0]  # the second time, from the cache of both ranks
    assert calls["dcp_mla_decode"] == calls["gather_heads"] == calls["combine"] >= 2 * 3 * (NUM_NEW - 1)
    assert calls["dcp_mla_prefill"] >= 2 * 3 * 2
    assert calls["start_context"] >= 2 * 3
    assert warm_up["dcp_mla_decode"] == warm_up["gather_heads"] == warm_up["combine"] > 10
    assert warm_up["dcp_mla_prefill"] > warm_up["start_context"] > 10


def test_a_cache_in_8_bits(model: tuple[Path, Any], tmp_path: Path) -> None:
    """transformers' logprobs over rounded latents, which differ from those over exact ones by five times as much as is
    allowed: a latent near the middle of two codes may go to the other one.
    """
    prompts = prompts_of(5, 33, 162, 300)  # whose tokens are all ahead by 0.04
    options = {"page_size": 16, "kv_cache_dtype": "fp8_e4m3"}
    served, *_ = serve(model[0], tmp_path, [[prompt] for prompt in prompts], options)
    for prompt, (request,) in zip(prompts, served, strict=True):
        logprobs, tokens = logprobs_over_rounded_latents(model[1], prompt, request["tokens"][:-1], CHUNK).max(-1)
        assert request["tokens"] == tokens.tolist()
        torch.testing.assert_close(torch.tensor(request["logprobs"]), logprobs, atol=0.02, rtol=0)
        _, exact = expected(model[1], prompt)
        assert max(abs(a - b) for a, b in zip(request["logprobs"], exact, strict=True)) > 0.1


def test_a_merge_left_out_is_seen(model: tuple[Path, Any], tmp_path: Path) -> None:
    """The tests of this file can fail."""
    prompts = prompts_of(33)
    served, calls, _ = serve(model[0], tmp_path, [prompts], {}, SGLANG_TEST_BREAK="1")
    tokens, logprobs = expected(model[1], prompts[0])
    (request,) = served[0]
    assert request["tokens"][0] == tokens[0]  # a prefill merges nothing across ranks
    assert calls["dcp_mla_decode"]
    assert max(abs(a - b) for a, b in zip(request["logprobs"], logprobs, strict=True)) > 0.01


def test_no_token_of_a_failed_step_leaves(model: tuple[Path, Any], tmp_path: Path) -> None:
    """The prompt makes the first token, four decode steps the next ones. In the fourth an exchange of the last rank
    fails, whose tokens SGLang does not take.
    """
    job, site = tmp_path / "job.json", tmp_path / "site"
    job.write_text(json.dumps({"engine": ENGINE | {"model_path": str(model[0])}}))
    (tmp_path / "calls").touch()
    env = environment() | sglang_variables(site) | {"SGLANG_TEST_CALLS": str(tmp_path / "calls")}
    env["SGLANG_TEST_FAULT"] = f"4 {(412 << 32) | 1}"
    done = subprocess.run(
        [sys.executable, str(CPU / "stream.py"), str(job)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    line = "combine failed on rank 1 of the group [0, 1]: nothing came from rank 0 for 60 s, in exchange 412"
    assert f"PeerFault: {line}" in done.stderr, done.stderr[-4000:]
    assert done.returncode != 0
    assert set(map(int, done.stdout.split())) <= {1, 2, 3, 4}
