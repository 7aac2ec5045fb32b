"""Kimi-K3's checkpoints as they are published, against float64; test_transformers.py has more layouts."""

import json
from pathlib import Path

import pytest

from tests.integrations.test_transformers import check, make_cases
from tests.support.kimi_k3_files import save_k3
from tests.support.models import STATE_FAMILIES

pytestmark = pytest.mark.skipif("kimi_k3" not in STATE_FAMILIES, reason="needs a transformers with Kimi Linear")
PUBLISHED = json.loads((Path(__file__).parents[1] / "planning" / "configs" / "kimi_k3.json").read_text())
QUANTIZATION = PUBLISHED["text_config"]["quantization_config"]


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Names, codes and scales as published; experts' sizes are whole groups of 32 on each rank."""
    reference = save_k3(tmp_path, moe_intermediate_size=64, quantization_config=QUANTIZATION)
    check(reference, tmp_path, 2, make_cases(2, [2], (1,), ("auto",)))


def test_groups_of_other_sizes(tmp_path: Path) -> None:
    """One layer a group, and one group of all layers; more bounds left out."""
    for size, beta in ((1, 2.0), (5, 4.0)):
        reference = save_k3(tmp_path / str(size), attn_res_block_size=size, activation_situ_beta=beta)
        check(reference, tmp_path / str(size), 1, make_cases(1, [1], (1,), ("auto",)))
