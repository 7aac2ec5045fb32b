"""From a transformers config to the sizes that plans need: transformers builds the model without weights, rules say
how the runtime cuts its parameters and which stay quantized.
"""

import copy
import logging
import re
from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from dcpmla.attention.placement import Placement
from dcpmla.hf_quantization import Scheme, has_mxfp8, is_among, stored_as
from dcpmla.integrations.eagle3 import Eagle3Files
from dcpmla.integrations.families.routing import num_routed_experts
from dcpmla.integrations.families.table import family_of
from dcpmla.integrations.parts import Shapes
from dcpmla.integrations.skeleton import build_skeleton, published_shapes
from dcpmla.parallel.formats import BLOCK, FORMATS, FP8, MXFP8, W4AFP8, Format
from dcpmla.planning.parameter import Parameter
from dcpmla.planning.weights import ModelSize

_logger = logging.getLogger(__name__)
_STYLES = {  # the last word of a module's name -> the features that ranks divide
    **dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "sinks", "o_a_proj", "lm_head", "markov_w2"), "column"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "column"),
    **dict.fromkeys(("k_proj", "v_proj", "f_proj", "g_proj", "f_b_proj", "g_b_proj", "b_proj"), "column"),
    **dict.fromkeys(("conv1d", "A_log", "dt_bias"), "column"),
    **dict.fromkeys(("o_proj", "o_b_proj", "down_proj", "routed_expert_up_proj"), "row"),
}
# Weights of one product, stacked in this order; the product stays quantized if every weight can.
_PRODUCTS = (
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("q_proj", "k_proj", "v_proj", "f_proj", "g_proj", "f_a_proj", "g_a_proj", "b_proj"),
    ("indexer.wk", "indexer.weights_proj"),
    (
        *("q_a_proj", "kv_proj", "compressor.kv_proj", "compressor.gate_proj", "compressor.indexer.kv_proj"),
        *("compressor.indexer.gate_proj", "compressor.indexer.scorer.weights_proj"),
    ),
)
# Norms of hyper-connections' sums (`model.streams.Connection`), which are held in float32.
_STREAM_NORMS = (".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight")


def read_model(config: Any, with_mtp: bool = False, eagle3: Eagle3Files | None = None) -> ModelSize:
    """Return the sizes of a transformers config's model, in bfloat16 if it names no dtype; nothing is allocated.

    Args:
        with_mtp: Whether the MTP module counts, too (`Family.check_mtp`).
        eagle3: EAGLE3 head that counts, too; None without.
    Raises:
        ValueError: The architecture is unknown, or transformers cannot build a model from the config.
    """
    family, block = family_of(config), f"model.layers.{config.num_hidden_layers}"
    if with_mtp:
        config = family.with_mtp_layer(config)
    attention = family.attention(config, with_mtp)
    try:
        model = build_skeleton(config)
    except Exception as error:  # transformers raises many kinds
        raise ValueError(f"model (--model): transformers builds no model of this config: {error}") from error
    mtp_shapes = family.mtp_shapes(config, block, published_shapes(model)) if with_mtp else {}
    parameters = _group(model, config) + _around_mtp_block(mtp_shapes, config)
    if eagle3 is not None:
        attention, parameters = eagle3.attention(attention), parameters + _of_head(eagle3, config)
    return ModelSize(
        attention=attention,
        max_position_embeddings=config.max_position_embeddings,
        num_routed=num_routed_experts(config) + (getattr(config, "zero_expert_num", 0) or 0),  # LongCat's zero experts
        experts_per_token=getattr(config, "num_experts_per_tok", 0) or 0,
        parameters=parameters,
    )


def warn_of_cuts(model: nn.Module, placement: Placement, expert_parallel: bool) -> None:
    """Log, on the first rank, which quantized weights of a model without memory the ranks hold dequantized, because
    cuts run through their blocks or groups.
    """
    if placement.mesh.tp_rank:
        return
    layout = placement.mesh.tp_size, expert_parallel
    apart = [each for each in _group(model, model.config) if each.is_cut_apart(*layout)]
    if apart:
        num_values = sum(each.count * prod(each.shard_shape(*layout)) for each in apart)
        keeps_experts = any(each.is_expert for each in apart) and not expert_parallel
        _logger.warning(
            "tensor_parallel_size (-tp) %d cuts through blocks or groups of quantized weights (%s): a rank holds them "
            "dequantized, in %s bytes; %s",
            placement.mesh.tp_size,
            ", ".join(sorted({each.name for each in apart})),
            f"{num_values * placement.dtype.itemsize:,}",
            "--enable-expert-parallel keeps experts whole"
            if keeps_experts
            else "a smaller -tp may keep them as stored",
        )


def _group(model: nn.Module, config: Any) -> tuple[Parameter, ...]:
    """Return the parameters and stored buffers of all layers, equal ones counted."""
    itemsize = (config.dtype or torch.bfloat16).itemsize
    quantization = getattr(config, "quantization_config", None) or {}
    formats, stored = _formats(model, config, quantization), set(model.state_dict())
    groups: Counter[Parameter] = Counter()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in stored:
            continue
        shape = tuple(tensor.shape)
        if ".experts." in name:
            if getattr(config, "zero_expert_num", None):  # transformers makes room for these, no checkpoint holds them
                shape = (num_routed_experts(config), *shape[1:])
        elif len(shape) > 2:  # convolutions and rates of linear attention
            shape = tuple(size for size in shape if size > 1)
        in_blocks = bool(quantization) and not re.search(r"\.self_attn\.|\.engram\.|lm_head", name)
        stores = _held_itemsize(name, tensor, model, itemsize), formats.get(name)
        cuts = _num_pieces(name, shape, config), in_blocks
        parameter = Parameter(_wildcard(name), shape, 1, _style(name), *stores, *cuts)
        groups[replace(parameter, least=_least_outputs(name, model))] += 1
    if config.tie_word_embeddings:  # the runtime's head is a separate tensor
        shape = (config.vocab_size, config.hidden_size)
        groups[Parameter("lm_head.weight", shape, 1, "column", itemsize)] += 1
    return tuple(replace(group, count=count) for group, count in groups.items())


def _of_head(eagle3: Eagle3Files, config: Any) -> tuple[Parameter, ...]:
    """Return the parameters of an EAGLE3 head, held in the dtype of a model's config."""
    skeleton = eagle3.skeleton(len(eagle3.layer_ids(config.num_hidden_layers)))
    for name in eagle3.shared:
        skeleton.get_submodule(name.removesuffix(".weight")).weight = None
    of_head = copy.copy(eagle3.config)
    of_head.dtype = config.dtype
    return tuple(replace(each, name=f"eagle3.{each.name}") for each in _group(skeleton, of_head))


def _around_mtp_block(shapes: Shapes, config: Any) -> tuple[Parameter, ...]:
    """Return the parameters around an MTP module's layer, as if the checkpoint does not quantize them."""
    itemsize = (config.dtype or torch.bfloat16).itemsize
    collapses = any(".hc_head_" in name for name in shapes)  # a `Connection`, which holds float32
    wide = (".hc_head_", ".shared_head.") if collapses else ()
    sizes = {name: 4 if any(word in name for word in wide) else itemsize for name in shapes}
    return tuple(Parameter(_wildcard(name), shape, 1, _style(name), sizes[name]) for name, shape in shapes.items())


def _has_streams(name: str, model: Any) -> bool:
    """Return whether a norm belongs to a hyper-connection, as all do but an MTP module's of one stream."""
    layer = re.match(r"model\.layers\.\d+", name)
    return hasattr(model.config, "hc_mult") and (layer is None or hasattr(model.get_submodule(layer[0]), "attn_hc"))


def _held_itemsize(name: str, tensor: Tensor, model: Any, itemsize: int) -> int:
    """Return the bytes of a number of a tensor where it is not quantized, in a model whose numbers have itemsize."""
    if name.endswith((".gate.weight", ".classifier.weight")):  # a router's; transformers may widen it
        is_float32 = getattr(model.config, "rounter_params_dtype", "") == "float32"  # the key that LongCat publishes
        return 3 * itemsize if is_float32 and itemsize < 4 else itemsize  # `model.router.split_weight`
    if name.endswith((".A_log", ".dt_bias", ".conv1d.weight")):
        return itemsize if name.endswith("weight") else 4
    if name.endswith(("_res_norm.weight", "_res_proj.weight")):  # `model.sums.Mixer` holds their product in float32
        return 4 if name.endswith("_proj.weight") else 0
    if name.endswith((".engram.q_weight", ".engram.k_weight")):  # `model.memory` holds their product in float32
        return 4 if name.endswith("q_weight") else 0
    if name.endswith((".weights_proj.weight", ".k_norm.weight", ".k_norm.bias", "lm_head.weight")):
        return itemsize  # transformers widens HY V4's
    if name.endswith(_STREAM_NORMS) and _has_streams(name, model):
        return 4
    is_wide = not isinstance(tensor, nn.Parameter) or is_among(name, model._keep_in_fp32_modules_strict)
    return tensor.dtype.itemsize if is_wide else itemsize  # routers' corrections are float32 in every checkpoint


def _formats(model: Any, config: Any, quantization: dict[str, Any]) -> dict[str, Format]:
    """Return the format of each of the parameters (linear layers, experts) that a checkpoint has in blocks or groups
    which the runtime can keep, if no cut runs through them.
    """
    if not quantization:
        return {}
    wide = [*(model._keep_in_fp32_modules or []), *model._keep_in_fp32_modules_strict]
    shapes = {
        f"{name}.weight": module.weight.shape for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    words = (".experts.", ".engram.embed.")
    shapes |= {
        name: parameter.shape for name, parameter in model.named_parameters() if any(word in name for word in words)
    }
    formats: dict[str, Format] = {}
    for name, shape in shapes.items():
        module = re.sub(r"\.experts\.(?:gate_)?(\w+_proj)$", r".experts.0.\1", name).removesuffix(".weight")
        scheme = None if is_among(name, wide) else stored_as(config, module)
        if scheme is not None and (format_ := held_as(scheme, shape, has_mxfp8(quantization))):
            formats[name] = format_
    return {name: format_ for name, format_ in formats.items() if _is_kept(name, formats, shapes, model)}


def held_as(scheme: Scheme, shape: tuple[int, ...], has_groups: bool) -> Format | None:
    """Return the format in which a rank can hold a matrix, or experts."""
    if scheme.codes != "fp8":
        columns = min(scheme.columns, shape[-1])
        held = W4AFP8 if scheme.takes_fp8 else FORMATS[scheme.codes]
        return held._replace(columns=columns, has_zeros=scheme.has_zeros)
    if has_groups:
        return MXFP8 if len(shape) == 2 else None  # routed experts in this format are dequantized
    sides = zip((scheme.rows, scheme.columns), shape[-2:], strict=True)
    return FP8 if all(side % BLOCK == 0 or side >= size for side, size in sides) else None


def _is_kept(name: str, formats: dict[str, Format], shapes: dict[str, torch.Size], model: Any) -> bool:
    """Return whether a quantized parameter stays so in the product that it is a part of."""
    found = re.match(r"(.*\.self_attn(?:\.\d+)?)\.(.*)\.weight$", name)
    if not found:
        return not name.endswith((".fc1.weight", ".fc2.weight"))  # gates of norms keep the model's dtype
    prefix, word = found.groups()
    if word == "kv_b_proj":
        attention = model.get_submodule(prefix)
        is_whole = attention.qk_nope_head_dim % BLOCK == 0 == attention.v_head_dim % BLOCK
        return is_whole and formats[name] == FP8
    if word == "o_a_proj":
        return model.config.o_lora_rank % BLOCK == 0 and not formats[name].is_packed
    if word in ("q_proj", "k_proj", "v_proj") and formats[name] == FP8 and _has_heads_of_keys(prefix, model):
        return bool(model.config.head_dim % BLOCK == 0)  # the product is stacked head by head
    for product in _PRODUCTS:
        names = [other for part in product if (other := f"{prefix}.{part}.weight") in shapes]
        if name not in names:
            continue
        if {formats.get(other) for other in names} != {formats[name]}:
            return False
        if formats[name] == FP8 and any(shapes[other][0] % BLOCK for other in names[:-1]):
            return False
    return True


def _style(name: str) -> str:
    """Return how the runtime cuts a parameter."""
    if ".engram." in name:  # a rank holds some buckets of a table, and their columns of the projection
        return {"embed": "column", "kv_proj": "row"}.get(name.removesuffix(".weight").rpartition(".")[2], "whole")
    if ".indexer." in name or ".compressor." in name:
        return "whole"
    return _STYLES.get(re.sub(r"\.(weight|bias)$", "", name).rpartition(".")[2], "whole")


def _num_pieces(name: str, shape: tuple[int, ...], config: Any) -> int:
    """Return the number of equal parts that are cut one by one: one per shared expert that the runtime computes as a
    further expert, two for gate and up.
    """
    if len(shape) == 3:
        return 2 if name.endswith("gate_up_proj") else 1
    size = getattr(config, "moe_intermediate_size", None)
    if ".shared_experts." not in name or not size:
        return 1
    whole = shape[-1] if "down_proj" in name else shape[0]
    return 1 if whole % size else whole // size


def _least_outputs(name: str, model: Any) -> int:
    """Return the outputs of a projection that are never cut: a head of keys or values (`GroupedAttention`)."""
    found = re.match(r"(.*\.self_attn)\.[kv]_proj\.", name)
    return model.config.head_dim if found and _has_heads_of_keys(found[1], model) else 1


def _has_heads_of_keys(prefix: str, model: Any) -> bool:
    """Return whether a layer of attention caches keys and values of heads: neither latents nor states."""
    attention = model.get_submodule(prefix)
    return hasattr(attention, "k_proj") and not hasattr(attention, "A_log")


def _wildcard(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
