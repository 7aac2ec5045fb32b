"""Drafts of the MTP modules of GLM-5-Next, dots3 and Ling, against a module in plain torch; bytes as planned."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.test_mtp import NUM_DRAFTS, PROMPTS, serve_families
from tests.support.models import STATE_FAMILIES, WINDOW_FAMILIES
from tests.support.plain_mtp import PlainMtp
from tests.support.ranks import run_ranks

MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    family: (family, {})
    for family in ("glm5_next_text", "dots3_note_text", "bailing_hybrid")
    if family in STATE_FAMILIES + WINDOW_FAMILIES
}
if WINDOW_FAMILIES:
    MODULES["dots3_indexed"] = "dots3_note_text", {"mtp_layer_types": ["full_attention"]}


@pytest.mark.parametrize(("tp", "dcp_size"), [(1, 1), (2, 1), (2, 2)])
def test_drafts_are_those_of_the_module(tp: int, dcp_size: int, tmp_path: Path) -> None:
    modules = {name: PlainMtp(family, **fields) for name, (family, fields) in MODULES.items()}
    directories = [module.save(tmp_path / name) for name, module in modules.items()]
    ranks = run_ranks(tp, serve_families, directories, tp, dcp_size, NUM_DRAFTS)
    assert all(outcome == ranks[0] for outcome in ranks[1:])
    for index, (tokens, record) in enumerate(ranks[0]):
        name = list(modules)[index // 2]
        for prompt, new in zip(PROMPTS, tokens, strict=True):
            with torch.no_grad():
                logits = modules[name].base(torch.tensor([prompt + new[:-1]])).logits[0, len(prompt) - 1 :]
            assert new == logits.argmax(-1).tolist()
        assert len(record) > 10
        for known, drafts in record[:: max(1, len(record) // 6)]:
            assert drafts == modules[name].drafts(known, len(drafts)), (name, index % 2, len(known))
