"""A.X-K1's checkpoints as they are published: without what corrects the choice of experts, and with a norm of each
layer's MLP, which dense layers do not use.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.integrations.test_transformers import check, make_cases
from tests.support.models import random_model, tiny_config


def test_published_checkpoints(tmp_path: Path) -> None:
    reference = random_model(tiny_config("axk1"))
    gate = reference.get_submodule("model.layers.1.mlp.gate")
    gate.e_score_correction_bias.zero_()
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert "model.layers.1.post_mlp_layernorm.weight" in tensors
    tensors["model.layers.0.post_mlp_layernorm.weight"] = torch.full((48,), torch.nan)
    save_file(tensors, file, metadata={"format": "pt"})
    check(reference, tmp_path, 2, make_cases(2, [2], (1,), ("a2a",)))
