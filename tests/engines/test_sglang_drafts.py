"""SGLang's own engine over our backend with drafts of an MTP module, on CPUs: transformers' tokens and logprobs, and the
drafts of the module in plain torch.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.sglang_cases import CONFIG, NUM_NEW, expected, serve
from tests.engines.sglang_tree import for_sglang, prompts_of
from tests.engines.vllm_drafts import Module, make_module
from tests.support.models import random_model

DRAFTS = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
MIXED, MANY = prompts_of(1, 5, 33, 150, 300), prompts_of(*range(2, 14))
BATCHES = [MIXED, MIXED, MANY]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny model whose next token depends on the last one most, and a module that predicts it."""
    directory, config = tmp_path_factory.mktemp("model"), deepcopy(CONFIG)
    config.num_hidden_layers = config.first_k_dense_replace = 3
    model = random_model(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(150)
    model.save_pretrained(directory)
    width = config.hidden_size
    torch.manual_seed(0)
    own = {"enorm": torch.rand(width) + 0.5, "hnorm": torch.rand(width) + 0.5}
    own["shared_head.norm"] = model.model.norm.weight.detach().clone()
    own["eh_proj"] = torch.cat([30 * torch.diag(1 / own["enorm"]), torch.randn(width, width) * 0.02], 1)
    return for_sglang(make_module(directory, own))


@pytest.mark.parametrize(("dcp_size", "page_size"), [(2, 16), (2, 1), (1, 16)])
def test_what_transformers_generates(directory: Path, tmp_path: Path, dcp_size: int, page_size: int) -> None:
    record = tmp_path / "drafts"
    options = DRAFTS | {"dcp_size": dcp_size, "page_size": page_size}
    served, calls, _ = serve(directory, tmp_path, BATCHES, options, SGLANG_TEST_DRAFTS=str(record))
    module = Module(str(directory), masks_first=False)
    tokens_of: dict[tuple[int, ...], list[int]] = {}
    for prompts, requests in zip(BATCHES, served, strict=True):
        for prompt, request in zip(prompts, requests, strict=True):
            tokens, logprobs = expected(module.base, prompt)
            assert request["tokens"] == tokens
            torch.testing.assert_close(request["logprobs"], logprobs, atol=1e-4, rtol=0)
            tokens_of[tuple(prompt)] = prompt + tokens
    print(calls)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    print(len(lines), lines[:4])
    right = 0
    for line in lines:
        tokens = tokens_of[tuple(line["prompt"])]
        if line["known"] <= len(tokens):
            assert line["drafts"] == module.drafts(tokens[:line["known"]], 3)
            right += 1
    print(right)
