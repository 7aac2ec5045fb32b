"""Quantization of a Hugging Face config: the methods whose weights can be read, and the blocks that share a scale."""

from collections.abc import Mapping
from typing import Any

from dcpmla.config import LARGEST_SIZE
from dcpmla.fields import FLAG, TEXT, Rule, check_fields, list_of, one_of, optional, whole

WHOLE = 1 << 62  # rows or columns of a block that has all of them
_METHODS = ("fp8", "compressed-tensors", "modelopt")
_SCHEMES = {  # of the methods that have several: the field that says which, and those whose weights are e4m3
    "compressed-tensors": ("format", ("float-quantized", "naive-quantized")),
    "modelopt": ("quant_algo", ("FP8",)),
}
_BLOCK = list_of(whole(1, LARGEST_SIZE), 2)
_STRATEGIES = {"tensor": (WHOLE, WHOLE), "channel": (1, WHOLE)}  # of compressed-tensors; "block" says its own


def _is_fp8_group(group: object) -> bool:
    """Tell whether a group of compressed-tensors' has e4m3 weights whose scales are known."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or (weights.get("num_bits"), weights.get("type")) != (8, "float"):
        return False
    strategy = str(weights.get("strategy"))
    return strategy in _STRATEGIES or (strategy == "block" and _BLOCK.holds(weights.get("block_structure")))


_RULES = {
    "weight_block_size": optional(_BLOCK),
    "activation_scheme": one_of(("dynamic", "static")),
    "modules_to_not_convert": optional(list_of(TEXT)),
    "modules_to_convert": optional(list_of(TEXT)),
    "ignored_layers": optional(list_of(TEXT)),
    "ignore": optional(list_of(TEXT)),
    "config_groups": Rule(
        "an object of groups, each with weights of 8 bits, type float, strategy tensor, channel or block",
        lambda value: isinstance(value, dict) and value != {} and all(map(_is_fp8_group, value.values())),
    ),
    "dequantize": FLAG,
}


def check_quantization(quantization: Mapping[str, Any]) -> None:
    """Raise ValueError for a quantization_config of weights that cannot be read, by the field that says so."""
    label = "quantization_config.{}".format
    check_fields({"quant_method": one_of(_METHODS)}, {"quant_method": None, **quantization}, label)
    method = quantization["quant_method"]
    if method in _SCHEMES:
        field, schemes = _SCHEMES[method]
        check_fields(
            {field: one_of(schemes)}, {field: None, **quantization}, f"quantization_config.{{}} of {method}".format
        )
    required = {"config_groups": None} if method == "compressed-tensors" else {}
    check_fields(_RULES, {**required, **quantization}, label)
    if len(_blocks(quantization)) > 1:
        raise ValueError(f"{label('config_groups')} differ in the weights that share a scale; they must be alike")


def scale_block(quantization: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the rows and columns of a quantized matrix that share a scale; WHOLE is all of them.

    Args:
        quantization: a quantization_config that `check_quantization` has let through; without one, DeepSeek's blocks.
    """
    return next(iter(_blocks(quantization))) if quantization else (128, 128)


def _blocks(quantization: Mapping[str, Any]) -> set[tuple[int, int]]:
    if quantization["quant_method"] == "compressed-tensors":
        weights = [group["weights"] for group in quantization["config_groups"].values()]
        return {_STRATEGIES.get(part["strategy"]) or tuple(part["block_structure"]) for part in weights}
    rows, cols = quantization.get("weight_block_size") or (WHOLE, WHOLE)
    return {(rows, cols)}
