"""Reading checkpoints: safetensors shards, scales of caches, and faults of a file."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcpmla.attention.mla.fp8_scales import KV_SCALE_NAMES, read_scale
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.checkpoint import Checkpoint
from dcpmla.integrations.families.family import Family
from dcpmla.integrations.families.table import FAMILIES
from dcpmla.integrations.model_files import find_model, load_config
from dcpmla.integrations.transformers import load_model
from dcpmla.parallel.mesh import init_mesh
from tests.support.models import save_tiny
from tests.support.ranks import run_ranks


def test_shards_with_and_without_an_index(tmp_path: Path) -> None:
    reference = save_tiny("deepseek_v3", tmp_path)
    reference.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) > 2
    (tmp_path / "shards" / "._hidden.safetensors").write_bytes(b"not a checkpoint")
    names, whole = Checkpoint(tmp_path).names, Checkpoint(tmp_path).weights("")
    for has_index in (True, False):
        if not has_index:
            (tmp_path / "shards" / "model.safetensors.index.json").unlink()
        checkpoint = Checkpoint(tmp_path / "shards")
        assert checkpoint.names == names
        assert all(torch.equal(weight[:], whole[name][:]) for name, weight in checkpoint.weights("").items())
    shards[0].rename(tmp_path / "moved.safetensors")
    assert Checkpoint(tmp_path / "shards").names < names
    (tmp_path / "shards" / "copy.safetensors").write_bytes(shards[1].read_bytes())
    with pytest.raises(ValueError, match=r"checkpoint: tensor .* is in .* and in another file of its directory"):
        Checkpoint(tmp_path / "shards")


def test_absent_shards_are_named_when_their_tensors_are_used(tmp_path: Path) -> None:
    save_file({"a.w": torch.ones(2, 3), "b.w": torch.ones(4).to(torch.float8_e4m3fn)}, tmp_path / "one.safetensors")
    files = {"a.w": "one", "b.w": "one", "b.w_scale": "two", "c.w": "two", "mtp.w": "three"}
    weight_map = {name: f"{file}.safetensors" for name, file in files.items()}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names == files.keys()
    assert checkpoint.dtype == torch.float32
    checkpoint.check_shapes({"a.w": (2, 3)})
    assert torch.equal(checkpoint.weights("")["a.w"][:], torch.ones(2, 3))
    for name, shard in (("b.w", "two"), ("c.w", "two"), ("mtp.w", "three")):
        message = f"tensor {name} is in {shard}.safetensors, which is not in the model's directory"
        with pytest.raises(ValueError, match=message):
            checkpoint.check_shapes({name: (4,)})
        with pytest.raises(ValueError, match=message):
            checkpoint.weights("")[name][:]


CALIBRATED = [
    {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}},
    {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
    {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    {"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
]


@pytest.mark.parametrize("quantization", CALIBRATED)
def test_unquantized_weights_with_a_calibrated_cache(quantization: dict[str, Any], tmp_path: Path) -> None:
    """The config is as without the field: no code after this asks for scales of weights."""
    save_tiny("deepseek_v3", tmp_path)
    plain = load_config(tmp_path).to_dict()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    assert load_config(tmp_path).to_dict() == plain


@pytest.mark.parametrize("name", ["k_scale", "attn.k_scale", "k_proj.k_scale", "kv_scale", "k_proj.output_scale"])
def test_names_of_a_cache_s_scale(name: str, tmp_path: Path) -> None:
    save_file({f"model.layers.0.self_attn.{name}": torch.tensor([0.5])}, tmp_path / "model.safetensors")
    weights = Checkpoint(tmp_path, rename=partial(Family().module_name, num_layers=4)).weights(
        "model.layers.0.self_attn."
    )
    assert read_scale(weights, KV_SCALE_NAMES) == 0.5


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has neither model.safetensors nor model.safetensors.index.json"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="model.safetensors is not a readable safetensors file"):
        Checkpoint(tmp_path)
    with pytest.raises(ValueError, match="has no readable config.json"):
        load_config(tmp_path)
    with pytest.raises(ValueError, match=r"model \(--model\) is 'no/such model': no such directory"):
        find_model("no/such model")
    with pytest.raises(ValueError, match=r"model.safetensors', a file; give the directory that it is in"):
        find_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("family", ["deepseek_v3", "longcat_flash", "deepseek_v4"])
def test_shards_of_unused_tensors_are_not_opened(family: str, tmp_path: Path) -> None:
    """An MTP module's shard is opened if drafts need it, a vision tower's never; here, both are broken files."""
    save_tiny(family, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "text.safetensors")
    module = {"deepseek_v3": "model.layers.2.enorm.weight", "longcat_flash": "model.mtp.norm.weight"}
    files = dict.fromkeys(load_file(tmp_path / "text.safetensors"), "text.safetensors")
    files |= {module.get(family, "mtp.0.enorm.weight"): "mtp.safetensors", "vision_tower.w": "vision.safetensors"}
    for name in ("mtp", "vision"):
        (tmp_path / f"{name}.safetensors").write_text("broken")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert run_ranks(1, load_with_and_without_mtp, tmp_path) == [["", "mtp.safetensors is not a readable"]]


def load_with_and_without_mtp(directory: Path) -> list[str]:
    """Return one rank's messages about a checkpoint, without and with its MTP module."""
    dcp, mesh, cpu = DCPConfig(block_size=16), init_mesh(1, 1), torch.device("cpu")
    exchange, messages = select_exchange(dcp, mesh.dcp_group, cpu), []
    for with_mtp in (False, True):
        try:
            load_model(directory, load_config(directory), dcp, mesh, exchange, torch.float32, cpu, with_mtp=with_mtp)
            messages.append("")
        except ValueError as error:
            messages.append(str(error).partition(f"{directory}/")[2].partition(" safetensors file")[0])
    return messages


@pytest.mark.parametrize("model_type", [model_type for model_type in FAMILIES if "deepseek_v4" not in model_type])
def test_names_of_text_models(model_type: str) -> None:
    """Every family reads a text model inside a multimodal one, packed codes and a calibrated cache's scales."""
    name = "language_model.model.layers.1.self_attn.k_proj.output_scale"
    assert FAMILIES[model_type].module_name(name, 4) == "model.layers.1.self_attn.k_scale"
    name = "model.language_model.layers.1.mlp.experts.0.up_proj.weight_packed"
    assert FAMILIES[model_type].module_name(name, 4) == "model.layers.1.mlp.experts.0.up_proj.weight"
