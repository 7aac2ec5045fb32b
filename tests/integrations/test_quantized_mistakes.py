"""Quantized checkpoints that are broken, or that no layer takes, are named."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dcpmla.hf_quantization import check_quantization
from dcpmla.integrations.checkpoint import Checkpoint
from dcpmla.parallel.linear import read_linear
from tests.support.quantized_models import AWQ, GPTQ, SCHEMES

E4M3 = torch.zeros(40, 256, dtype=torch.float8_e4m3fn)
PACKED = torch.zeros(40, 32, dtype=torch.int8)
GRID = torch.ones(1, 2)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": E4M3}, "tensor w has dtype F8_E4M3, but there are no scales in w_scale_inv or w_scale"),
        ({"w": PACKED}, "tensor w has dtype I8, but there are no scales"),
        (
            {"w": E4M3, "w_scale_inv": torch.ones(2, 2)},
            r"w of shape \(40, 256\) has scales of shape \(2, 2\); blocks of 40 x 128 ask for \(1, 2\)",
        ),
        ({"w": E4M3, "w_scale": torch.ones(())}, r"has scales of shape \(\); blocks of 40 x 128 ask for \(1, 2\)"),
        ({"w": E4M3[0], "w_scale": torch.ones(2)}, r"w of shape \(256,\) has scales of shape \(2,\)"),
        ({"w": E4M3, "w_scale_inv": GRID.int()}, "w of dtype F8_E4M3 .* has scales of dtype I32"),
        ({"w": PACKED, "w_scale": torch.ones(40, 3)}, r"w of dtype I8 and shape \(40, 32\) has scales of dtype F32"),
        (
            {"w": PACKED[:, :12], "w_scale": torch.ones(40, 1).byte()},
            r"scales of dtype U8 and shape \(40, 1\); codes may",
        ),
        ({"w": PACKED, "w_scale": torch.ones(40, 1).byte()}, r"in whole groups .* I8, U8 with scales of F8_E8M0, U8"),
        ({"w.weight": PACKED.int()}, "tensor w.weight has dtype I32, but there are no scales"),
        ({"w": PACKED.int(), "w_scale": torch.ones(40, 3)}, r"w of dtype I32 .* and shape \(40, 3\); codes may"),
        ({"w": PACKED.int(), "w_scale": GRID.byte()}, "w of dtype I32 .* I32 with scales of F32.* .AWQ"),
        ({"w": E4M3.float(), "w_scale_inv": GRID}, "w of dtype F32 .* has scales of dtype F32"),
        *(
            ({"w": E4M3, "w_scale_inv": GRID * bad}, "tensor w has a scale that is negative, infinite or NaN")
            for bad in (-1, math.inf, math.nan)
        ),
        ({"w": E4M3, "w_scale_inv": GRID.byte() * 255}, "tensor w has a scale that is negative, infinite or NaN"),
        ({"w": PACKED, "w_scale": torch.full((40, 2), 255).byte()}, "tensor w has a scale that is negative, infinite"),
    ],
)
def test_broken_scales_are_named(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    shape = (40, 64) if next(iter(tensors.values())).dtype == torch.int8 else (40, 256)
    with pytest.raises(ValueError, match=message):
        read_linear(Checkpoint(tmp_path).weights(""), next(iter(tensors)), shape)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
COMPRESSED = {"quant_method": "compressed-tensors"}


def with_groups(scheme: dict[str, Any], *weights: dict[str, Any]) -> dict[str, Any]:
    """Return a quantization whose groups have these weights."""
    return {**scheme, "config_groups": {f"group_{number}": {"weights": each} for number, each in enumerate(weights)}}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "quark"}, "quant_method is 'quark'; it must be one of fp8, compressed-tensors, modelopt"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo of modelopt is 'W4A8_AWQ'; .* one of FP8"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "X"}},
            },
            "quantized_layers.a.quant_algo is 'X'",
        ),
        (AWQ | {"bits": 8}, "bits of awq is 8; it must be 4"),
        (AWQ | {"version": "gemv"}, "version of awq is 'gemv'; it must be one of gemm"),
        (AWQ | {"zero_point": False}, "zero_point of awq is False"),
        (GPTQ | {"desc_act": True}, "desc_act of gptq is True; it must be false"),
        (GPTQ | {"sym": False}, "sym of gptq is False; it must be true"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic has rules for single modules"),
        ({"quant_method": "modelopt"}, "quant_algo of modelopt is None"),
        (with_groups({**COMPRESSED, "format": "dense"}, CHANNEL), "format of compressed-tensors is 'dense'"),
        (
            {**COMPRESSED, "format": "int-quantized"},
            "format of compressed-tensors is 'int-quantized'; it must be one of float-quantized",
        ),
        *(
            (
                with_groups(SCHEMES["int4"].config, INT4 | wrong),
                "config_groups is .* 4 bits, type int, strategy group or channel",
            )
            for wrong in (
                {"num_bits": 8},
                {"actorder": "group"},
                {"group_size": 0},
                {"type": "float"},
            )
        ),
        ({**COMPRESSED, "format": "float-quantized"}, "config_groups is None"),
        (
            with_groups(SCHEMES["compressed_channel"].config, CHANNEL | {"num_bits": 4}),
            "config_groups is .* weights of 8 bits",
        ),
    ],
)
def test_other_quantizations_are_named(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_quantization(quantization)


def test_modelopt_repeats_its_algorithm_in_groups() -> None:
    numbers = {"dynamic": False, "num_bits": 8, "type": "float"}
    groups = {"group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}}
    check_quantization({"quant_method": "modelopt", "quant_algo": "FP8", "config_groups": groups})
