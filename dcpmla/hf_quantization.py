"""Quantization of a Hugging Face config: methods with readable weights, and the format of each matrix."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from dcpmla.fields import FLAG, SIZE, TEXT, Rule, check_fields, list_of, one_of, only, optional, whole

WHOLE = 1 << 62  # rows or columns of a block without a limit
_CACHE_FIELDS = ("kv_cache_scheme", "kv_cache_quant_algo")  # modelopt's fields that describe a calibrated cache
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")  # lists of modules
_METHODS = ("fp8", "compressed-tensors", "modelopt", "w4afp8", "awq", "gptq")
_FORMATS = {  # compressed-tensors' formats, and their codes
    "float-quantized": "fp8",
    "naive-quantized": "fp8",
    "pack-quantized": "int4",
    "mxfp4-pack-quantized": "fp4",
    "nvfp4-pack-quantized": "nvfp4",
}
_MIXED = "mixed-precision"  # compressed-tensors' format if each group has its own
_BLOCK = list_of(SIZE, 2)
_EXPERT = re.compile(r"\.experts\.")
_ANY = "Linear"  # compressed-tensors' target of all linear layers


class Scheme(NamedTuple):
    """How matrices are stored.

    Attributes:
        codes: "fp8", or in 4 bits "int4", "fp4" (MXFP4) or "nvfp4".
        rows, columns: Rows and columns that share a scale; WHOLE means all.
        has_zeros: Whether each group has a zero point.
        takes_fp8: Whether integers may multiply rows in e4m3.
    """

    codes: str
    rows: int = 1
    columns: int = 32
    has_zeros: bool = False
    takes_fp8: bool = False


_BLOCK_FP8 = Scheme("fp8", 128, 128)
_W4AFP8 = Scheme("int4", columns=128, takes_fp8=True)  # SGLang's constant
_ALGORITHMS = {  # modelopt's
    "FP8": Scheme("fp8", WHOLE, WHOLE),
    "FP8_PB_WO": _BLOCK_FP8,
    "NVFP4": Scheme("nvfp4", columns=16),
    "W4A16_NVFP4": Scheme("nvfp4", columns=16),
}
_MIXED_ALGORITHM = "MIXED_PRECISION"  # an algorithm for each of quantized_layers; without them it is w4afp8


def _scheme(weights: Mapping[str, Any], codes: str) -> Scheme | None:
    """Return how compressed-tensors stores weights; None if they are not read."""
    numbers = weights.get("num_bits"), weights.get("type")
    size, strategy, is_symmetric = weights.get("group_size"), weights.get("strategy"), weights.get("symmetric", True)
    block: Any = weights.get("block_structure")
    match codes, numbers, strategy:
        case "fp8", (8, "float"), "tensor":
            return Scheme("fp8", WHOLE, WHOLE)
        case "fp8", (8, "float"), "channel":
            return Scheme("fp8", 1, WHOLE)
        case "fp8", (8, "float"), "block" if _BLOCK.holds(block):
            return Scheme("fp8", *block)
        case "int4", (4, "int"), "group" if SIZE.holds(size) and weights.get("actorder") != "group":
            return Scheme("int4", 1, weights["group_size"], not is_symmetric)
        case "int4", (4, "int"), "channel" if weights.get("actorder") != "group":
            return Scheme("int4", 1, WHOLE, not is_symmetric)
        case "fp4", (4, "float"), "group" if size == 32:
            return Scheme("fp4")
        case "nvfp4", (4, "float"), "tensor_group" if size == 16:
            return _ALGORITHMS["NVFP4"]
    return None


def _codes_of(group: Mapping[str, Any], file_format: object) -> str:
    """Return the codes of compressed-tensors' group, "" for a format that is not read."""
    own = group.get("format")
    return _FORMATS.get(str(file_format if own is None or file_format != _MIXED else own), "")


_READABLE = (
    "8 bits, type float, strategy tensor, channel or block (float-quantized); 4 bits, type int, strategy group or "
    "channel, actorder not group (pack-quantized); or 4 bits, type float, strategy group of 32 (mxfp4-pack-quantized) "
    "or tensor_group of 16 (nvfp4-pack-quantized)"
)


def _groups_of(file_format: object) -> Rule:
    """Return the rule of config_groups in files of a format."""

    def is_readable(group: Any) -> bool:
        weights = group.get("weights") if isinstance(group, dict) else None
        return isinstance(weights, dict) and _scheme(weights, _codes_of(group, file_format)) is not None

    return Rule(
        f"an object of groups, each with a readable format and weights of {_READABLE}",
        lambda value: isinstance(value, dict) and value != {} and all(map(is_readable, value.values())),
    )


_RULES = {
    "weight_block_size": optional(_BLOCK),
    "activation_scheme": one_of(("dynamic", "static")),
    **dict.fromkeys((*_IGNORED, "modules_to_convert"), optional(list_of(TEXT))),
    "dequantize": FLAG,
}
# What each method's own fields must be; a field that is left out is None.
_OF_METHOD: dict[str, dict[str, Rule]] = {
    "compressed-tensors": {"format": one_of((*_FORMATS, _MIXED))},
    "modelopt": {"quant_algo": one_of((*_ALGORITHMS, _MIXED_ALGORITHM))},
    "awq": {"bits": only(4), "group_size": whole(-1), "zero_point": only(True), "version": one_of(("gemm",))},
    "gptq": {"bits": only(4), "group_size": whole(-1), "sym": only(True), "desc_act": only(False)},
}
_OTHER_NAMES = {"bits": "w_bit", "group_size": "q_group_size"}  # of older files in AWQ


def check_quantization(quantization: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the field, for a quantization_config of unreadable weights."""
    label = "quantization_config.{}".format
    check_fields({"quant_method": one_of(_METHODS)}, {"quant_method": None, **quantization}, label)
    if not has_quantized_weights(quantization):
        return
    method = quantization["quant_method"]
    rules = _OF_METHOD.get(method, {})
    fields = {name: _field(quantization, name) for name in rules}
    check_fields(rules, fields, f"quantization_config.{{}} of {method}".format)
    check_fields(_RULES, quantization, label)
    if method == "compressed-tensors":  # modelopt's groups repeat its quant_algo
        rule = _groups_of(quantization["format"])
        check_fields({"config_groups": rule}, {"config_groups": None, **quantization}, label)
    if method == "gptq" and quantization.get("dynamic"):
        raise ValueError(f"{label('dynamic')} has rules for single modules, which are not read; it must be empty")
    for name, layer in (quantization.get("quantized_layers") or {}).items():
        check_fields(
            {"quant_algo": one_of((*_ALGORITHMS,))},
            {"quant_algo": None, **layer},
            label(f"quantized_layers.{name}.{{}}").format,
        )


def _field(quantization: Mapping[str, Any], name: str) -> Any:
    return quantization.get(name, quantization.get(_OTHER_NAMES.get(name, name)))


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


def stored_as(config: Any, module: str) -> Scheme | None:
    """Return how a config has a model's matrix, by its module's name in a checkpoint; None if it is not quantized.

    DeepSeek-V4's config names the codes of routed experts in expert_dtype, or in a field of quantization_config, to
    which newer versions of transformers move it.
    """
    quantization = getattr(config, "quantization_config", None) or {}
    is_fp4 = "fp4" in (getattr(config, "expert_dtype", None), quantization.get("expert_dtype"))
    if is_fp4 and _EXPERT.search(module):
        return Scheme("fp4")
    ignored = [each for name in _IGNORED for each in quantization.get(name) or []]
    if is_among(module, ignored or ["lm_head"]):
        return None
    found = [scheme for target, scheme in _schemes(quantization) if _is_target(target, module)]
    return found[0] if found else None


def all_schemes(config: Any) -> set[Scheme]:
    """Return the schemes of a config."""
    quantization = getattr(config, "quantization_config", None) or {}
    of_experts = stored_as(config, "model.layers.0.mlp.experts.0.up_proj")
    return {scheme for _, scheme in _schemes(quantization)} | ({of_experts} if of_experts else set())


def has_mxfp8(quantization: Mapping[str, Any]) -> bool:
    """Return whether e4m3 weights have e8m0 scales per 32 columns, of one row or of more (DeepSeek-V4.1)."""
    is_by_32 = any(columns == 32 for _, columns in scale_blocks(quantization))
    return is_by_32 and quantization.get("scale_fmt") == "ue8m0"


def scale_blocks(quantization: Mapping[str, Any] | None) -> tuple[tuple[int, int], ...]:
    """Return rows and columns of e4m3 matrices that share a scale, each pair that a checkpoint may have.

    Args:
        quantization: A quantization_config that `check_quantization` accepts; None means DeepSeek's blocks.
    """
    schemes = [scheme for _, scheme in _schemes(quantization or {})]
    return tuple(dict.fromkeys((each.rows, each.columns) for each in schemes if each.codes == "fp8")) or ((128, 128),)


def _schemes(quantization: Mapping[str, Any]) -> Iterator[tuple[str, Scheme]]:
    """Yield targets, patterns after "re:" or names, and their schemes, in the order of preference."""
    match quantization.get("quant_method"):
        case "compressed-tensors":
            own: list[tuple[str, Scheme]] = []
            others: list[tuple[str, Scheme]] = []
            file_format = quantization["format"]
            for group in quantization["config_groups"].values():
                scheme = _scheme(group["weights"], _codes_of(group, file_format))
                assert scheme is not None  # `check_quantization`
                if scheme.codes == "int4" and not scheme.has_zeros:
                    scheme = scheme._replace(takes_fp8=_are_fp8(group.get("input_activations")))
                for target in group.get("targets") or [_ANY]:
                    (others if target == _ANY else own).append((target, scheme))
            yield from own + others
        case "modelopt" if layers := quantization.get("quantized_layers"):
            yield from ((name, _ALGORITHMS[layer["quant_algo"]]) for name, layer in layers.items())
        case "modelopt" if quantization["quant_algo"] != _MIXED_ALGORITHM:
            yield _ANY, _ALGORITHMS[quantization["quant_algo"]]
        case "w4afp8" | "modelopt":
            yield from ((r"re:.*\.experts\.", _W4AFP8), (_ANY, _BLOCK_FP8))
        case "awq" | "gptq" as method:
            size = _field(quantization, "group_size")
            yield _ANY, Scheme("int4", 1, WHOLE if size < 1 else size, method == "awq")
        case "fp8":
            yield _ANY, Scheme("fp8", *(quantization.get("weight_block_size") or (WHOLE, WHOLE)))


def _are_fp8(activations: Any) -> bool:
    """Return whether compressed-tensors' group is for rows in e4m3."""
    numbers = activations if isinstance(activations, dict) else {}
    return (numbers.get("num_bits"), numbers.get("type")) == (8, "float")


def fp8_rows_of(quantization: Mapping[str, Any] | None) -> Callable[[str], bool]:
    """Return a function from a matrix's module to whether it may multiply rows in e4m3, if it has integers in 4 bits.

    Args:
        quantization: A quantization_config that `check_quantization` accepts; None means no such matrix.
    """
    schemes = [*_schemes(quantization or {})]

    def takes_fp8(module: str) -> bool:
        return next((scheme.takes_fp8 for target, scheme in schemes if _is_target(target, module)), False)

    return takes_fp8


def _is_target(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target in (_ANY, module)


def is_among(name: str, modules: Any) -> bool:
    """Return whether a parameter is, or belongs to, one of some modules, whose names may be the last parts of it, or
    patterns, with * or as a regular expression after "re:".
    """
    return any(re.search(_pattern(module), name) for module in modules or ())


def _pattern(module: str) -> str:
    if module.startswith("re:"):
        return f"^(?:{module[3:]})"
    escaped = re.escape(module).replace(re.escape("*"), ".*")
    return rf"(^|\.){escaped}(\.|$)"
