"""benchmarks/checkpoints.py: what it writes is what transformers would write for the model, and loads."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from tests.support.models import save_tiny, tiny_config

ROOT = Path(__file__).parents[2]


def load_module() -> Any:
    spec = importlib.util.spec_from_file_location("checkpoints", ROOT / "benchmarks" / "checkpoints.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checkpoints = load_module()


def read(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            tensors.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118
    return tensors


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v2_no_q_lora", "deepseek_v3"])
def test_names_and_shapes_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    num_bytes = checkpoints.save_random(tiny_config(family), tmp_path / "ours")
    save_tiny(family, tmp_path / "theirs")
    ours, theirs = read(tmp_path / "ours"), read(tmp_path / "theirs")
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in theirs.items()
    }
    assert num_bytes == sum(tensor.nbytes for tensor in ours.values())
    for name, tensor in ours.items():
        assert tensor.dtype == (torch.float32 if name.endswith("correction_bias") else torch.bfloat16)
        if "norm" in name:
            assert bool((tensor == 1).all())
        elif not name.endswith("bias"):  # initializer_range 0.2
            assert 0.15 < float(tensor.float().std()) < 0.25
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(ours)
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_attention_of_v2_lite_has_the_published_sizes() -> None:
    """tests/bench has its parameters in all, and those of DeepSeek-V3."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(checkpoints.v2_lite(2, 16))
    shapes = {name: (*weight.shape,) for name, weight in model.model.layers[1].self_attn.state_dict().items()}
    latent, heads = {"kv_a_proj_with_mqa.weight": (576, 2048), "kv_a_layernorm.weight": (512,)}, 16
    projections = {"q_proj.weight": (heads * 192, 2048), "kv_b_proj.weight": (heads * 256, 512)}
    assert shapes == latent | projections | {"o_proj.weight": (2048, heads * 128)}
