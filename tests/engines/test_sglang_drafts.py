"""SGLang's own engine over our backend with drafts of an MTP module, TP 2 on CPUs: transformers' tokens and logprobs,
and the drafts of the module in plain torch.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.sglang_cases import CONFIG, NUM_NEW, check_answers, serve
from tests.engines.sglang_tree import DRAFTS, OLDEST, VERSION, for_sglang, prompts_of
from tests.engines.vllm_drafts import Module, make_module
from tests.support.models import random_model

MIXED, MANY = prompts_of(1, 5, 33, 150, 480), prompts_of(*range(2, 14))
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


@pytest.mark.parametrize(
    ("release", "options"),
    [
        (VERSION, {"dcp_size": 2, "page_size": 1}),
        (OLDEST, {"dcp_size": 1, "page_size": 16, "disable_overlap_schedule": False}),
    ],
)
def test_drafts(directory: Path, tmp_path: Path, release: str, options: dict[str, Any]) -> None:
    """Prompts in pieces, alone and together, prefixes from the cache, and a request aborted between drafts."""
    record = tmp_path / "drafts"
    variables = {"SGLANG_TEST_DRAFTS": str(record)}
    served, calls, _ = serve(directory, tmp_path, BATCHES, DRAFTS | options, release, **variables)
    module = Module(str(directory), masks_first=False)
    after = check_answers(module.base, BATCHES, served)
    assert served[1][-1]["cached"] >= 448 > served[0][-1]["cached"]
    steps = [request["steps"] for requests in served for request in requests]
    assert sum(steps) < 0.9 * len(steps) * (NUM_NEW - 1)  # the first token needs no step; drafts are right

    records = [json.loads(line) for line in record.read_text().splitlines()]
    known = [(after[tuple(line["prompt"])], line["known"], line["drafts"]) for line in records]
    known = [(tokens[:number], drafts) for tokens, number, drafts in known if number <= len(tokens)]
    assert len(known) > 2 * len(after)
    assert [drafts for _, drafts in known] == [module.drafts(tokens, 3) for tokens, _ in known]
    assert any(drafts != module.drafts(tokens[-2:], 3) for tokens, drafts in known if len(tokens) > 2)

    per_step = 2 + 1 + 2  # layers that verify and extend, and steps that draft
    assert calls["dcp_mla_decode"] > per_step * max(steps) * len(BATCHES)
    assert calls["dcp_mla_prefill"] >= 3 * 2  # the long prompt's pieces
    exchanged = calls["dcp_mla_decode"] if options["dcp_size"] > 1 else 0
    assert calls["gather_heads"] == calls["combine"] == exchanged
