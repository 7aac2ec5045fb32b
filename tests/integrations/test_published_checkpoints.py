"""Checkpoints as they are published, where tiny models are saved otherwise: text models inside multimodal ones, weights
that are left out or that no layer reads. Against transformers' models.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.model_files import load_config
from tests.integrations.test_published_fields import as_published
from tests.integrations.test_transformers import check, make_cases, rewrite_config
from tests.support.models import FAMILIES, drop_zero_experts, random_model, save_tiny, tiny_config

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
WHISPER = {"d_model": 16, "encoder_attention_heads": 2, "encoder_layers": 1, "encoder_ffn_dim": 32}
AUDIO = {"whisper_config": WHISPER, "adapter_input_size": 16, "adapter_out_dim": 48, "downsample_hidden_size": 8}
CALIBRATED = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}


def rewrite_weights(directory: Path, changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Change tensors of a saved model, None to leave one out; return all."""
    tensors = load_file(directory / "model.safetensors") | changes
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tensors


def save_kimi(directory: Path) -> Any:
    """Save a DeepSeek-V3 as the text model of a Kimi-K2.5, and return transformers' model of the whole."""
    save_tiny("deepseek_v3", directory)
    code = {"auto_map": {"AutoConfig": "absent.KimiK2Config"}}
    text = json.loads((directory / "config.json").read_text()) | {"model_type": "kimi_k2"} | code
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


def save_dots3(directory: Path) -> Any:
    """Save a multimodal model, without text_config and by other names of fields. MTP modules and indexers of windows
    are not read.
    """
    text = tiny_config("dots3_note_text")
    vision = VISION | {"adapter_in_dim": 32, "adapter_out_dim": 48, "pyramid_num_routed": [-1]}
    config = transformers.Dots3NoteConfig(text_config=text.to_dict(), vision_config=vision, audio_config=AUDIO)
    model = transformers.Dots3NoteForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(random_model(text).model.state_dict())
    model.save_pretrained(directory)
    unread = ("mtp.0.eh_proj.weight", "model.layers.4.eh_proj.weight", "model.layers.1.self_attn.indexer.wk.weight")
    rewrite_weights(directory, {name: torch.zeros(1) for name in unread})
    raw = json.loads((directory / "config.json").read_text())
    saved = raw.pop("text_config")
    (directory / "config.json").write_text(json.dumps(flat_dots3(saved) | raw))
    assert attention_of(load_config(directory)) == attention_of(text)
    return model


def flat_dots3(saved: dict[str, Any]) -> dict[str, Any]:
    """Return fields of dots3's text model as they are published."""
    layers = ["full_attention" if kind == "indexed_attention" else kind for kind in saved["layer_types"]]
    return {
        **{name: value for name, value in as_published("dots3_note_text", saved).items() if name != "model_type"},
        **{"layer_types": layers, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1},
        **{"apply_mla_qkv_lora_rescale": True, "attention_gate_type": "headwise", "topk_method": "noaux_tc"},
        **{"swa_attention_gate_type": "headwise", "scoring_func": "sigmoid"},
    }


def save_axk1(directory: Path) -> Any:
    """Save a model without what corrects the choice of experts, with a norm of each layer's MLP, which dense layers do
    not use, and with scales of a calibrated cache.
    """
    reference = random_model(tiny_config("axk1"))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    reference.state_dict()[bias].zero_()
    reference.save_pretrained(directory)
    scales = [f"model.layers.{layer}.self_attn.{name}_proj.output_scale" for layer in range(2) for name in "qkv"]
    norm = {"model.layers.0.post_mlp_layernorm.weight": torch.full((48,), torch.nan)}
    tensors = rewrite_weights(directory, {bias: None, **norm, **{name: torch.ones(1) for name in scales}})
    assert "model.layers.1.post_mlp_layernorm.weight" in tensors
    rewrite_config(directory, {"quantization_config": CALIBRATED | {"kv_cache_scheme": {"num_bits": 8}}})
    return reference


def save_longcat(directory: Path) -> Any:
    """Save a model without weights of zero experts, which are the identity; transformers writes them."""
    reference = save_tiny("longcat_flash", directory)
    drop_zero_experts(directory, 4)
    return reference


def save_mistral_large4(directory: Path) -> Any:
    """Save a model by transformers' names: all experts of a layer are one tensor, projections have biases. Drafts'
    module is not read.
    """
    reference = save_tiny("mistral_large4_text", directory, attention_bias=True)
    tensors = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    tensors["mtp_dspark.layers.0.wq.weight"] = torch.zeros(4, 4)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return reference


CASES: list[tuple[Callable[[Path], Any], str]] = [
    (save_mistral, "mistral4"),
    (save_axk1, "axk1"),
    (save_longcat, "longcat_flash"),
]
if hasattr(transformers, "Kimi_K25ForConditionalGeneration"):
    CASES.append((save_kimi, "deepseek_v3"))
if "dots3_note_text" in FAMILIES:
    CASES.append((save_dots3, "dots3_note_text"))
if "mistral_large4_text" in FAMILIES:
    CASES.append((save_mistral_large4, "mistral_large4_text"))


@pytest.mark.parametrize(("save", "model_type"), CASES)
def test_logits_and_tokens(save: Callable[[Path], Any], model_type: str, tmp_path: Path) -> None:
    reference = save(tmp_path)
    assert load_config(tmp_path).model_type == model_type
    check(reference, tmp_path, 2, make_cases(2, [2], (1, 4), ("a2a",)))


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
