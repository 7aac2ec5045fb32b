"""transformers' model without weights: its shapes, and the modules that this package leaves as they are."""

import re
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn

from dcpmla.integrations.checkpoint import Checkpoint
from dcpmla.parallel.linear import Weight

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.")  # a tensor of one expert: its layer's prefix, its number


def build_skeleton(config: Any, checkpoint: Checkpoint) -> Any:
    """Return transformers' model for a config, its parameters without memory.

    Raises:
        ValueError: tensors of the checkpoint that are missing or have another shape.
    """
    model_class: Any = getattr(transformers, f"{type(config).__name__.removesuffix('Config')}ForCausalLM")
    with init_empty_weights(include_buffers=False):
        model = model_class(config).eval()
    _check_shapes(model, checkpoint)
    return model


def is_attention(module: nn.Module) -> bool:
    """Tell whether a module of transformers' is self-attention that this package computes: MLA, or DeepSeek-V4's."""
    return hasattr(module, "kv_a_proj_with_mqa") or hasattr(module, "sinks")


def is_feed_forward(module: nn.Module) -> bool:
    """Tell whether a module of transformers' is an MLP with a gate, or a mixture of experts."""
    return hasattr(module, "experts") or (hasattr(module, "gate_proj") and hasattr(module, "down_proj"))


def is_plain_block(layer: nn.Module) -> bool:
    """Tell whether a decoder layer is norm, attention, norm and MLP or experts, as `DecoderBlock` computes it."""
    children = {name for name, _ in layer.named_children()}
    return children == {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


def load_module(
    module: nn.Module, weights: Mapping[str, Weight], prefix: str, model: Any, dtype: torch.dtype, device: torch.device
) -> None:
    """Give a module of transformers' its own parameters and buffers, not those of modules in it, on a device.

    Args:
        prefix: of its weights' names.
        model: tells what stays in float32.
        dtype: of all other floating-point weights.
    """
    for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        value = tensor
        if name not in module._non_persistent_buffers_set:
            value = weights[prefix + name][:]
            if value.is_floating_point():
                value = value.to(torch.float32 if _stays_float32(model, prefix + name) else dtype)
        value = value.to(device)
        setattr(module, name, nn.Parameter(value, False) if name in module._parameters else value)


def _stays_float32(model: Any, name: str) -> bool:
    """Tell whether transformers keeps a parameter in float32 whatever the model's dtype is."""
    kept = model._keep_in_fp32_modules_strict or ()
    return any(re.search(rf"(^|\.){re.escape(module)}($|\.)", name) for module in kept)


def _check_shapes(model: Any, checkpoint: Checkpoint) -> None:
    """Raise ValueError for a weight that is missing or of another shape than the model's, and for surplus experts."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    num_experts: dict[str, int] = {}
    for prefix, experts in model.named_modules():
        if not prefix.endswith(".experts"):
            continue
        num_experts[prefix], hidden_size, size = experts.down_proj.shape
        if f"{prefix}.down_proj" in checkpoint.names:
            continue
        del shapes[f"{prefix}.down_proj"], shapes[f"{prefix}.gate_up_proj"]
        for number, weight in product(range(num_experts[prefix]), ("gate_proj", "up_proj", "down_proj")):
            shape = (hidden_size, size) if weight == "down_proj" else (size, hidden_size)
            shapes[f"{prefix}.{number}.{weight}.weight"] = shape
    zero_experts = getattr(model.config, "zero_expert_num", None) or 0
    for name in checkpoint.names:
        prefix, digits = found.groups() if (found := _EXPERT.match(name)) else ("", "0")
        if prefix in num_experts and int(digits) >= num_experts[prefix] + zero_experts:
            raise ValueError(
                f"checkpoint: tensor {name} is one too many; the model's config has n_routed_experts "
                f"{num_experts[prefix]}"
            )
    checkpoint.check_shapes(shapes)
    # Layers of attention know best what they lack: some of GLM-5's have no indexer of their own.
    missing = {name for name in shapes.keys() - checkpoint.names if ".self_attn." not in name}
    if model.config.tie_word_embeddings:
        missing -= {"lm_head.weight"}
    if missing:
        raise ValueError(f"checkpoint: {len(missing)} tensors are missing, the first is {min(missing)}")
