"""SGLang's own engine over our backend, TP 2 x DCP 2 on CPUs: transformers' tokens and logprobs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dcpmla.integrations.sglang.metadata import MAX_ABSORBED
from tests.engines.rounded import logprobs_over_rounded_latents
from tests.engines.sglang_cases import CHUNK, CONFIG, ENGINE, NUM_NEW, check_answers, launch, serve
from tests.engines.sglang_tree import for_sglang, prompts_of
from tests.support.models import random_model
from tests.support.oracle import Oracle

# Pieces of prompts, what is cached of a prompt, many at once; the second batch finds the first one's prefixes.
MIXED, MANY = prompts_of(1, 5, 33, 150, 480), prompts_of(*range(2, 22))
BATCHES = [MIXED, MIXED, MANY]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Save a tiny model; return its directory, and transformers' model."""
    directory = tmp_path_factory.mktemp("model")
    model = random_model(CONFIG)
    model.save_pretrained(directory)
    return for_sglang(directory), model


def test_what_transformers_generates(model: tuple[Path, Any], tmp_path: Path) -> None:
    """Prompts in pieces, few of which are long enough for a prefill, prefixes from the cache, and a request aborted."""
    served, calls, warm_up = serve(model[0], tmp_path, BATCHES, {"page_size": 16})
    check_answers(model[1], BATCHES, served)
    cached = [request["cached"] for request in served[1]]
    assert cached[-1] >= 448 > cached[0]  # the second time, from the cache of both ranks
    assert calls["dcp_mla_decode"] == calls["gather_heads"] == calls["combine"] >= 2 * 3 * (NUM_NEW - 1)
    assert calls["dcp_mla_prefill"] >= calls["start_context"] >= 2 * 2  # the long prompt's pieces
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
        logprobs, tokens = logprobs_over_rounded_latents(
            model[1], prompt, request["tokens"][:-1], CHUNK, max_absorbed=MAX_ABSORBED
        ).max(-1)
        assert request["tokens"] == tokens.tolist()
        torch.testing.assert_close(torch.tensor(request["logprobs"]), logprobs, atol=0.02, rtol=0)
        exact = Oracle(model[1]).logits(prompt, request["tokens"]).log_softmax(-1).amax(-1)
        assert float((torch.tensor(request["logprobs"]) - exact).abs().max()) > 0.1


def test_no_token_of_a_failed_step_leaves(model: tuple[Path, Any], tmp_path: Path) -> None:
    """The prompt makes the first token, four decode steps the next ones. In the fourth an exchange of the last rank
    fails, whose tokens SGLang does not take.
    """
    engine = ENGINE | {"model_path": str(model[0])}
    done = launch("stream.py", tmp_path, {"engine": engine}, SGLANG_TEST_FAULT=f"4 {(412 << 32) | 1}")
    line = "combine failed on rank 1 of the group [0, 1]: nothing came from rank 0 for 60 s, in exchange 412"
    assert f"PeerFault: {line}" in done.stderr, done.stderr[-4000:]
    assert done.returncode != 0
    assert set(map(int, done.stdout.split())) <= {1, 2, 3, 4}
