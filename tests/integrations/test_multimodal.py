"""Text models inside multimodal checkpoints: Kimi-K2.5's names as they are published, Mistral Small 4's as transformers
saves them, both against transformers' multimodal models.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dcpmla.integrations.model_files import load_config
from tests.integrations.test_transformers import check, make_cases
from tests.support.models import random_model, save_tiny, tiny_config

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def save_kimi(directory: Path) -> Any:
    """Save a DeepSeek-V3 as the text model of a Kimi-K2.5, and return transformers' model of the whole."""
    save_tiny("deepseek_v3", directory)
    text = json.loads((directory / "config.json").read_text()) | {"model_type": "kimi_k2"}
    config = {
        "model_type": "kimi_k25",
        "vision_config": VISION,
        "projection_hidden_size": 32,
        "dtype": text.pop("dtype"),
    }
    (directory / "config.json").write_text(json.dumps(config | {"text_config": text, "tie_word_embeddings": False}))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    tensors["vision_tower.patch_embed.pos_emb.weight"] = torch.zeros(64, 64, 32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return transformers.Kimi_K25ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()


def save_mistral(directory: Path) -> Any:
    vision = {**VISION, "model_type": "pixtral", "image_size": 28, "patch_size": 14}
    text = tiny_config("mistral4")
    config = transformers.Mistral3Config(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=False)
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(random_model(text).model.state_dict())
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("family", ["kimi", "mistral"])
def test_the_text_model_of_a_multimodal_one(family: str, tmp_path: Path) -> None:
    if family == "kimi" and not hasattr(transformers, "Kimi_K25ForConditionalGeneration"):
        pytest.skip("transformers has no Kimi-K2.5")
    reference = save_kimi(tmp_path) if family == "kimi" else save_mistral(tmp_path)
    assert load_config(tmp_path).model_type == ("deepseek_v3" if family == "kimi" else "mistral4")
    check(reference, tmp_path, 2, make_cases(2, [2], (1,), ("a2a",)))


def test_what_stands_outside_text_config_counts_there(tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    del text["dtype"], text["eos_token_id"]
    config = {"model_type": "any", "text_config": text, "dtype": "float16", "eos_token_id": 5, "hidden_size": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_config(tmp_path)
    assert (found.dtype, found.eos_token_id, found.hidden_size) == (torch.float16, 5, text["hidden_size"])


def test_another_text_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "any", "text_config": {"model_type": "qwen3"}}))
    with pytest.raises(ValueError, match="architecture 'qwen3' is not an MLA model this runtime knows"):
        load_config(tmp_path)
