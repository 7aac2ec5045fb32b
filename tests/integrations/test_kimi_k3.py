"""Kimi-K3's checkpoints as they are published, against float64; test_transformers.py has more layouts."""

import json
from pathlib import Path
from typing import Any

import pytest

from dcpmla.integrations.model_files import load_config
from tests.integrations.test_transformers import check, make_cases
from tests.support.kimi_k3_files import TEXT, save_k3
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope is False; it must be true"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (
            {"moe_router_activation_func": "softmax"},
            "moe_router_activation_func is 'softmax'; it must be one of sigmoid",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be one of silu, swish, situ"),
        (
            {"linear_attn_config": TEXT["linear_attn_config"] | {"kda_layers": [1, 3]}},
            r"kda_layers and full_attn_layers are \[1, 3\] and \[2, 5\]; together they must be the layers 1 to .* 5",
        ),
        (
            {"linear_attn_config": TEXT["linear_attn_config"] | {"gate_lower_bound": 1.0}},
            "linear_attn_config.gate_lower_bound is 1.0; it must be",
        ),
    ],
)
def test_fields_without_a_meaning_here(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "kimi_k3", "text_config": TEXT | changes}))
    with pytest.raises(ValueError, match=message):
        load_config(file)
