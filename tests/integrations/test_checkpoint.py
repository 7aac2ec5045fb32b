"""Reading slices of checkpoints: safetensors shards, block-quantized fp8, and what is wrong with a file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dcpmla.integrations.checkpoint import Checkpoint
from dcpmla.integrations.transformers import find_model, load_config
from tests.integrations.test_transformers import check, make_cases
from tests.support.models import random_model, save_tiny, tiny_config

BLOCK = 32  # smaller than DeepSeek's 128: a tiny matrix has several blocks, and cuts over heads run through them


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes and a scale for every block of BLOCK x BLOCK, written from the format's description."""
    rows, cols = (-(-size // BLOCK) for size in weight.shape)
    codes, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, cols)
    for row in range(rows):
        for col in range(cols):
            block = slice(row * BLOCK, (row + 1) * BLOCK), slice(col * BLOCK, (col + 1) * BLOCK)
            scales[row, col] = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scales[row, col]).to(torch.float8_e4m3fn)
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return codes.float() * wide[: codes.shape[0], : codes.shape[1]]


def save_fp8(directory: Path) -> Any:
    """Save a DeepSeek-V3 checkpoint as it ships, attention and MLPs in fp8 blocks; returns the float32 model of the
    dequantized weights.
    """
    config = tiny_config("deepseek_v3")
    # transformers, which reads the MLPs, knows whole blocks only; attention keeps sizes with ragged ones.
    config.hidden_size, config.intermediate_size, config.moe_intermediate_size = 2 * BLOCK, 4 * BLOCK, 2 * BLOCK
    model = random_model(config)
    model.save_pretrained(directory)
    tensors, dequantized = load_file(directory / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if name.endswith("_proj.weight") or name.endswith("_with_mqa.weight"):
            codes, scales = quantize(weight)
            tensors[name], tensors[name + "_scale_inv"] = codes, scales
            dequantized[name] = dequantize(codes, scales)
        else:
            dequantized[name] = weight
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK] * 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return type(model).from_pretrained(None, config=model.config, state_dict=dequantized).eval()


def test_slices_of_fp8_blocks(tmp_path: Path) -> None:
    weight = torch.randn(40, 56)
    codes, scales = quantize(weight)
    save_file({"a.w": codes, "a.w_scale_inv": scales, "a.plain": weight}, tmp_path / "model.safetensors")
    weights = Checkpoint(tmp_path, (BLOCK, BLOCK)).weights("a.")
    assert set(weights) == {"w", "plain"}
    assert tuple(weights["w"].shape) == (40, 56)
    for index in [(slice(5, 23), slice(None)), (slice(None), slice(30, 56)), (slice(16, 32), slice(1, 2))]:
        assert torch.equal(weights["w"][index], dequantize(codes, scales)[index])
        assert torch.equal(weights["plain"][index], weight[index])
    assert torch.equal(weights["w"][slice(3, 9)], dequantize(codes, scales)[3:9])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu_2)])
def test_fp8_checkpoint_generates_as_its_dequantized_model(device: str, tmp_path: Path) -> None:
    reference = save_fp8(tmp_path)
    check(reference, tmp_path, 2, make_cases(2, [2], (1,), ("a2a",)), device)


def test_sharded_files(tmp_path: Path) -> None:
    reference = random_model(tiny_config("deepseek_v3"))
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check(reference, tmp_path, 2, make_cases(2, [2], (1,), ("a2a",)))


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    reference = save_tiny("deepseek_v3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "model_type": "kimi_k2", "auto_map": {"AutoConfig": "absent.KimiK2Config"}})
    )
    assert load_config(tmp_path).model_type == "deepseek_v3"
    check(reference, tmp_path, 2, make_cases(2, [2], (1,), ("a2a",)))


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has neither model.safetensors nor model.safetensors.index.json"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="model.safetensors is not a readable safetensors file"):
        Checkpoint(tmp_path)
    save_file(
        {"w": torch.zeros(40, 56, dtype=torch.float8_e4m3fn), "w_scale_inv": torch.zeros(3, 3)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(
        ValueError, match=r"shape \(40, 56\) has scales of shape \(3, 3\); blocks of \(32, 32\) ask for \(2, 2\)"
    ):
        Checkpoint(tmp_path, (BLOCK, BLOCK)).weights("")
    with pytest.raises(ValueError, match="has no readable config.json"):
        load_config(tmp_path)
    with pytest.raises(ValueError, match=r"model \(--model\) is 'no/such model': no such directory"):
        find_model("no/such model")
