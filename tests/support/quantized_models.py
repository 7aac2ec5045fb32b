"""Checkpoints as they are published in 8 and 4 bits, made from tiny ones, and their twins of dequantized values.

The formats are written from their descriptions, with nothing of the package, so that a twin is an oracle.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models import save_tiny, tiny_config
from tests.support.packers import PACKERS, quantize_fp4

ALL = 1 << 30  # rows or columns of a block that is the whole matrix
# Linear layers and experts. Published checkpoints leave routers, the indexer's weights_proj and V4's compressors wide.
_QUANTIZED = re.compile(
    r"(self_attn|mlps?|experts)\.(.+\.)?(\w+_proj|kv_a_proj_with_mqa|wq_b|wk)\.weight$"
    r"|\.attn\.(indexer\.)?w\w+\.weight$|\.ffn\..*\.w[123]\.weight$"
    r"|^layers\.\d+\.(attention|\w*experts|feed_forward)\.(\w+\.)*w\w+\.weight$"  # Mistral's
)
_ROUTED_ALONE = ("int4", "mxfp4", "w4afp8", "w4a8", "mixed")  # schemes that have no other matrices in 4 bits
_ROUTED_EXPERT = re.compile(r"\.experts\.\d+\.(w[123]|\w+_proj)\.weight$")
_OF_WINDOWS = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 256, "qk_nope_head_dim": 192}
# By family, sizes of the models of `save_wide`.
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"head_dim": 128, "num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 128}
    | {"partial_rotary_factor": 0.5},
    "glm5_next_text": {"qk_rope_head_dim": 0, "qk_head_dim": 128, "linear_num_heads": 4, "linear_head_dim": 64},
    "mistral_large4_text": {"qk_nope_head_dim": 64, "qk_head_dim": 128, "initializer_range": 0.05},
    "dots3_note_text": {"head_dim": 256, "shared_experts_intermediate_size": 256}
    | {"per_layer_config": {layer: _OF_WINDOWS for layer in (1, 2)}},
}
PUBLISHED_NAMES = (  # what transformers' mapping of DeepSeek-V4 does not take back when it saves
    ("model.", ""),
    ("embed_tokens", "embed"),
    ("hc_head.hc_", "hc_head_"),
    (".attn.norm.", ".attn.kv_norm."),
)


@dataclass(frozen=True)
class Scheme:
    """A way to store matrices in e4m3, or (config: num_bits 4) in integers of 4 bits.

    Attributes:
        block: rows and columns that share a scale.
        suffix: of a scale's name, after its weight's.
        config: quantization_config of config.json.
        scale_dtype: e8m0 and uint8 hold exponents; then, and with powers_of_two, scales are powers of two.
        scale_shape: None where it has a dim for rows and one for columns of blocks.
        others: names of more scalars that lie beside a weight.
    """

    block: tuple[int, int]
    suffix: str
    config: dict[str, Any]
    scale_dtype: torch.dtype = torch.float32
    powers_of_two: bool = False
    scale_shape: tuple[int, ...] | None = None
    others: tuple[str, ...] = ()


def _fp8(**fields: Any) -> dict[str, Any]:
    ignored = {"modules_to_not_convert": ["lm_head", "weights_proj"]}
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **ignored, **fields}


def _compressed_tensors(file_format: str = "float-quantized", ignore: tuple[str, ...] = (), **weights: Any) -> Any:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*weights_proj", *ignore],
    }


def _int4(group_size: int | None, *ignore: str, **fields: Any) -> dict[str, Any]:
    fields = {"strategy": "group", "group_size": group_size, "actorder": None} | fields
    return _compressed_tensors("pack-quantized", ignore, num_bits=4, type="int", **fields)


_ROUTED_TARGET = r"re:.*mlp\.experts\..*"


def _mixed(**fields: Any) -> dict[str, Any]:
    """Return a config with a format for each group, experts in integers, and all others in block fp8. fields: More of
    the experts' group.
    """
    config = _compressed_tensors("mixed-precision", strategy="block", block_structure=[128, 128])
    experts = _int4(128)["config_groups"]["group_0"] | {
        "targets": [_ROUTED_TARGET],
        "format": "pack-quantized",
        **fields,
    }
    others = config["config_groups"]["group_0"] | {"format": "float-quantized"}
    return config | {"config_groups": {"group_0": others, "group_1": experts}}


W4AFP8 = {"quant_method": "w4afp8"}
_FP8_ROWS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
_NOT_ROUTED = "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"
_BLOCK = [128, 128]
_EXPONENTS = torch.float8_e8m0fnu
SCHEMES = {
    "block": Scheme((128, 128), "_scale_inv", _fp8(weight_block_size=_BLOCK)),
    "block_32": Scheme((32, 32), "_scale_inv", _fp8(weight_block_size=[32, 32])),
    "ue8m0": Scheme(
        (128, 128), "_scale_inv", _fp8(weight_block_size=_BLOCK, scale_fmt="ue8m0"), powers_of_two=True
    ),  # DeepSeek-V3.1
    "e8m0": Scheme((128, 128), "_scale_inv", _fp8(weight_block_size=_BLOCK, scale_fmt="ue8m0"), _EXPONENTS),
    "bytes": Scheme((128, 128), "_scale_inv", _fp8(weight_block_size=_BLOCK, scale_fmt="ue8m0"), torch.uint8),
    "e8m0_32": Scheme((32, 32), "_scale_inv", _fp8(weight_block_size=[32, 32], scale_fmt="ue8m0"), _EXPONENTS),
    "tensor": Scheme((ALL, ALL), "_scale", {**_fp8(), "activation_scheme": "static"}, scale_shape=()),
    "modelopt": Scheme(
        (ALL, ALL), "_scale", {"quant_method": "modelopt", "quant_algo": "FP8"}, scale_shape=(), others=("input_scale",)
    ),
    "compressed_tensor": Scheme((ALL, ALL), "_scale", _compressed_tensors(strategy="tensor"), scale_shape=(1,)),
    "compressed_channel": Scheme((1, ALL), "_scale", _compressed_tensors(strategy="channel"), torch.bfloat16),
    "compressed_block": Scheme(
        (128, 128), "_scale", _compressed_tensors(strategy="block", block_structure=_BLOCK), torch.bfloat16
    ),
    "int4": Scheme(  # Kimi-K2-Thinking: routed experts alone
        (1, 32),
        "_scale",
        _int4(32, *_NOT_ROUTED),
        torch.bfloat16,
    ),
    "int4_all": Scheme((1, 64), "_scale", _int4(64), torch.bfloat16),
    "mxfp4": Scheme(  # Kimi-K3: routed experts alone
        (1, 32),
        "_scale",
        _compressed_tensors("mxfp4-pack-quantized", _NOT_ROUTED, num_bits=4, strategy="group", group_size=32),
        torch.uint8,
    ),
    "mixed": Scheme((1, 128), "_scale", _mixed(), torch.bfloat16),
    "w4a8": Scheme((1, 128), "_scale", _mixed(input_activations=_FP8_ROWS), torch.bfloat16),
    "w4afp8": Scheme((1, 128), "_scale_inv", W4AFP8),
    "awq": Scheme(
        (1, 64), "", {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    ),
    "gptq": Scheme(
        (1, 128), "", {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    ),
    "int4_asymmetric": Scheme((1, 128), "", _int4(128, symmetric=False)),
    "int4_channel": Scheme((1, ALL), "", _int4(None, strategy="channel")),
    "nvfp4_ct": Scheme(
        (1, 16),
        "",
        _compressed_tensors("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
    "nvfp4": Scheme(
        (1, 16), "", {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*weights_proj"]}
    ),
    # DeepSeek-V4 alone: its names, routed experts in e2m1
    "published": Scheme((128, 128), "", _fp8(weight_block_size=_BLOCK, scale_fmt="ue8m0"), _EXPONENTS),
    # The same with DeepSeek-V4.1's blocks
    "published_32": Scheme((32, 32), "", _fp8(weight_block_size=[32, 32], scale_fmt="ue8m0"), _EXPONENTS),
}


def write_quantized(source: Path, target: Path, scheme: str) -> None:
    """Write a checkpoint's linear layers and experts in 8 or 4 bits, as one of SCHEMES; "published" ones have routed
    experts in 4 bits, DeepSeek-V4's names, and a norm of multi-token prediction.
    """
    tensors, chosen, is_published = {}, SCHEMES[scheme], scheme.startswith("published")
    for name, weight, codes, scales in _quantized(source, scheme):
        stored = published_name(name) if is_published else name
        if codes is None:
            tensors[stored] = weight
            continue
        if isinstance(codes, dict):
            tensors |= {stored.removesuffix("weight") + other: tensor for other, tensor in codes.items()}
            continue
        tensors[stored] = codes
        tensors[stored.removesuffix(".weight") + ".scale" if is_published else stored + chosen.suffix] = (
            scales if chosen.scale_shape is None else scales.reshape(chosen.scale_shape)
        )
        tensors |= {stored.removesuffix("weight") + other: torch.ones(()) for other in chosen.others}
    if is_published:
        tensors["mtp.0.norm.weight"] = torch.ones(256)
    more = {"expert_dtype": "fp4"} if is_published else {}
    _save(source, target, tensors, {"quantization_config": chosen.config, **more})


def write_dequantized(source: Path, twin: Path, scheme: str) -> None:
    """Write a checkpoint with the values that `write_quantized` stores, in the dtype and by the names of the source."""
    _save(source, twin, {name: values for name, values, *_ in _quantized(source, scheme)}, {})


def save_wide(family: str, directory: Path, **changes: int) -> Any:
    """Save a tiny model whose matrices are cut at multiples of 128 by two TP ranks (those of four cut query heads
    elsewhere), and return it. changes: Other sizes by their names in the config.
    """
    config = tiny_config(family)
    fields = config.to_dict() | {"per_layer_config": None}
    sizes: dict[str, Any] = {
        **{"hidden_size": 256, "intermediate_size": 512, "ffn_hidden_size": 512, "moe_intermediate_size": 256},
        **{"expert_ffn_hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 128},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_head_dim": 128},
        **{"head_dim": 64, "qk_head_dim": 192, "initializer_range": 0.1},
        **({} if fields.get("q_lora_rank") is None else {"q_lora_rank": 128}),
        **_OWN_SIZES.get(family, {}),
        **changes,
    }
    if family == "deepseek_v4":
        ropes = config.rope_parameters.items()
        sizes["rope_parameters"] = {name: rope | {"partial_rotary_factor": 0.5} for name, rope in ropes}
    return save_tiny(family, directory, **{name: size for name, size in sizes.items() if name in fields})


def published_name(name: str) -> str:
    """Return DeepSeek's name of a tensor of DeepSeek-V4 that transformers has saved."""
    for saved, published in PUBLISHED_NAMES:
        name = name.replace(saved, published)
    return name


def quantize(weight: Tensor, block: tuple[int, int], powers_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes and a float32 scale for every block; the last ones may be smaller."""
    rows, cols = (-(-size // side) for size, side in zip(weight.shape, block, strict=True))
    scales = torch.empty(rows, cols)
    for row in range(rows):
        for col in range(cols):
            part = weight[row * block[0] : (row + 1) * block[0], col * block[1] : (col + 1) * block[1]]
            scales[row, col] = part.abs().max().clamp(min=1e-9) / 448
    scales = scales.log2().ceil().exp2() if powers_of_two else scales
    return (weight.float() / spread(scales, weight.shape, block)).to(torch.float8_e4m3fn), scales


def dequantize(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the values of e4m3 codes, float32."""
    return codes.float() * spread(scales, codes.shape, block)


def spread(scales: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """Return each element's scale."""
    rows, cols = (min(side, size) for size, side in zip(shape, block, strict=True))
    return scales.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[: shape[0], : shape[1]]


def _quantized(source: Path, scheme: str) -> Iterator[tuple[str, Tensor, Tensor | dict[str, Tensor] | None, Tensor]]:
    """Yield each tensor's name, values, codes and scales as they are stored; codes are None where it stays as it is,
    and all tensors by the ends of their names where it is in 4 bits.
    """
    chosen = SCHEMES[scheme]
    for name, weight in load_file(source / "model.safetensors").items():
        chosen_names = _ROUTED_EXPERT if scheme in ("int4", "mxfp4") else _QUANTIZED
        is_in_4_bits = scheme in PACKERS and (scheme not in _ROUTED_ALONE or _ROUTED_EXPERT.search(name))
        if not chosen_names.search(name) or ".compressor." in name or name.endswith(".weights_proj.weight"):
            yield name, weight, None, weight
        elif is_in_4_bits:
            values, stored_parts = PACKERS[scheme](weight, min(chosen.block[1], weight.shape[1]))
            yield name, values.to(weight.dtype), stored_parts, weight
        elif scheme.startswith("published") and _ROUTED_EXPERT.search(name):
            codes, scales, values = quantize_fp4(weight)
            yield name, values.to(weight.dtype), codes, scales.to(_EXPONENTS)
        else:
            is_power = chosen.powers_of_two or chosen.scale_dtype.itemsize == 1
            block = (128, 128) if scheme in PACKERS else chosen.block  # beside 4 bits
            codes, scales = quantize(weight, block, is_power)
            stored = _exponents(scales) if chosen.scale_dtype == torch.uint8 else scales.to(chosen.scale_dtype)
            scales = scales if is_power else stored.float()
            yield name, dequantize(codes, scales, block).to(weight.dtype), codes, stored


def _exponents(scales: Tensor) -> Tensor:
    """Return the bytes of e8m0: a power of two's exponent, 127 for 1."""
    return (scales.log2() + 127).to(torch.uint8)


def _save(source: Path, target: Path, tensors: dict[str, Tensor], fields: dict[str, Any]) -> None:
    """Write tensors beside a copy of the source's other files, its config with more fields."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, target)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    if fields.get("quantization_config") == W4AFP8:  # in the file that SGLang reads
        own = {"quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}}
        (target / "hf_quant_config.json").write_text(json.dumps(own))
        fields = {}
    (target / "config.json").write_text(json.dumps(config | fields))
