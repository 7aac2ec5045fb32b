"""Quantization of a Hugging Face config: methods with readable weights, and blocks that share a scale."""

from collections.abc import Callable, Mapping
from typing import Any

from dcpmla.fields import FLAG, SIZE, TEXT, Rule, check_fields, list_of, one_of, optional

WHOLE = 1 << 62  # rows or columns of a block without a limit
_CACHE_FIELDS = ("kv_cache_scheme", "kv_cache_quant_algo")  # modelopt's fields that describe a calibrated cache
_METHODS = ("fp8", "compressed-tensors", "modelopt")
_PACKED = {"pack-quantized": "int4", "mxfp4-pack-quantized": "fp4"}  # compressed-tensors' formats in 4 bits
_SCHEMES = {  # methods with several schemes: the field that names the scheme, and the readable schemes
    "compressed-tensors": ("format", ("float-quantized", "naive-quantized", *_PACKED)),
    "modelopt": ("quant_algo", ("FP8",)),
}
_BLOCK = list_of(SIZE, 2)
_STRATEGIES = {
    "tensor": (WHOLE, WHOLE),
    "channel": (1, WHOLE),
}  # compressed-tensors' without sizes


def _is_fp8(weights: Mapping[str, Any]) -> bool:
    """Return whether compressed-tensors' weights are e4m3 with known scales."""
    strategy = str(weights.get("strategy"))
    has_scales = strategy in _STRATEGIES or (strategy == "block" and _BLOCK.holds(weights.get("block_structure")))
    return has_scales and (weights.get("num_bits"), weights.get("type")) == (8, "float")


def _is_int4(weights: Mapping[str, Any]) -> bool:
    """Return whether compressed-tensors' weights are integers in 4 bits, with columns in order."""
    has_scales = weights.get("strategy") == "group" and SIZE.holds(weights.get("group_size"))
    is_plain = weights.get("symmetric", True) is True and weights.get("actorder") != "group"
    return has_scales and is_plain and (weights.get("num_bits"), weights.get("type")) == (4, "int")


def _is_fp4(weights: Mapping[str, Any]) -> bool:
    """Return whether compressed-tensors' weights are MXFP4."""
    fields = {"strategy": "group", "group_size": 32, "num_bits": 4, "type": "float"}
    return all(weights.get(name) == value for name, value in fields.items())


def _groups(what: str, holds: Callable[[Mapping[str, Any]], bool]) -> Rule:
    """Return the rule of config_groups that all have such weights."""

    def is_such(group: object) -> bool:
        weights = group.get("weights") if isinstance(group, dict) else None
        return isinstance(weights, dict) and holds(weights)

    return Rule(
        f"an object of groups, each with weights of {what}",
        lambda value: isinstance(value, dict) and value != {} and all(map(is_such, value.values())),
    )


_RULES = {
    "weight_block_size": optional(_BLOCK),
    "activation_scheme": one_of(("dynamic", "static")),
    "modules_to_not_convert": optional(list_of(TEXT)),
    "modules_to_convert": optional(list_of(TEXT)),
    "ignored_layers": optional(list_of(TEXT)),
    "ignore": optional(list_of(TEXT)),
    "dequantize": FLAG,
}
_GROUPS = {  # by their codes
    None: _groups("8 bits, type float, strategy tensor, channel or block", _is_fp8),
    "int4": _groups("4 bits, type int, symmetric, strategy group, actorder not group", _is_int4),
    "fp4": _groups("4 bits, type float, strategy group, group_size 32", _is_fp4),
}


def check_quantization(quantization: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the field, for a quantization_config of unreadable weights."""
    label = "quantization_config.{}".format
    check_fields({"quant_method": one_of(_METHODS)}, {"quant_method": None, **quantization}, label)
    if not has_quantized_weights(quantization):
        return
    method = quantization["quant_method"]
    if method in _SCHEMES:
        field, schemes = _SCHEMES[method]
        check_fields(
            {field: one_of(schemes)}, {field: None, **quantization}, f"quantization_config.{{}} of {method}".format
        )
    check_fields(_RULES, quantization, label)
    if method == "compressed-tensors":  # modelopt's groups repeat its quant_algo
        groups = _GROUPS[packed_codes(quantization)]
        check_fields({"config_groups": groups}, {"config_groups": None, **quantization}, label)
    if len(_blocks(quantization)) > 1:
        raise ValueError(f"{label('config_groups')} differ in the weights that share a scale; they must be alike")


def has_quantized_weights(quantization: Mapping[str, Any]) -> bool:
    """Return whether a quantization_config covers weights, not only the scales of a cache.

    Without weights compressed-tensors has no groups, and modelopt no algorithm.
    """
    match quantization.get("quant_method"):
        case "compressed-tensors":
            groups = quantization.get("config_groups")
            return not (groups == {} or (groups is None and quantization.get("format") == "dense"))
        case "modelopt":
            has_cache = any(quantization.get(name) is not None for name in _CACHE_FIELDS)
            return quantization.get("quant_algo") is not None or not has_cache
    return True


def packed_codes(quantization: Mapping[str, Any] | None) -> str | None:
    """Return the codes of a quantization_config in 4 bits, "int4" or "fp4" (MXFP4); None for another one."""
    return _PACKED.get(str((quantization or {}).get("format")))


def expert_codes(config: Any) -> str | None:
    """Return the codes of a model's routed experts in 4 bits, "int4" or "fp4"; None for another format.

    DeepSeek-V4's config names them in expert_dtype, or in a field of quantization_config, to which newer versions of
    transformers move it.
    """
    quantization = getattr(config, "quantization_config", None) or {}
    is_fp4 = "fp4" in (getattr(config, "expert_dtype", None), quantization.get("expert_dtype"))
    return "fp4" if is_fp4 else packed_codes(quantization)


def has_mxfp8(quantization: Mapping[str, Any]) -> bool:
    """Return whether e4m3 weights have e8m0 scales per 32 columns, of one row or of more (DeepSeek-V4.1)."""
    return scale_block(quantization)[1] == 32 and quantization.get("scale_fmt") == "ue8m0"


def scale_block(quantization: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the rows and columns of a quantized matrix that share a scale; WHOLE means all.

    Args:
        quantization: A quantization_config that `check_quantization` accepts; None means DeepSeek's blocks.
    """
    return next(iter(_blocks(quantization))) if quantization else (128, 128)


def _blocks(quantization: Mapping[str, Any]) -> set[tuple[int, int]]:
    if quantization["quant_method"] == "compressed-tensors":
        weights = [group["weights"] for group in quantization["config_groups"].values()]
        return {_weights_block(part) for part in weights}
    rows, cols = quantization.get("weight_block_size") or (WHOLE, WHOLE)
    return {(rows, cols)}


def _weights_block(weights: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and columns that share a scale in a group of compressed-tensors'."""
    if weights["strategy"] == "group":
        return 1, weights["group_size"]
    rows, cols = _STRATEGIES.get(weights["strategy"]) or weights["block_structure"]
    return rows, cols
