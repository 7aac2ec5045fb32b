"""transformers' model without weights: its shapes."""

import re
from collections.abc import Collection, Iterator
from typing import Any

import torch

from dcpmla.integrations.checkpoint import Checkpoint
from dcpmla.integrations.families.family import NO_MTP, Family
from dcpmla.integrations.families.routing import Routing
from dcpmla.integrations.families.table import family_of
from dcpmla.integrations.parts import Shapes

_PART = re.compile(r"model\.layers\.\d+|model\.\w+|\w+")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.")  # a tensor of one expert: its layer's prefix, its number


def build_skeleton(config: Any, family: Family | None = None) -> Any:
    """Return transformers' model for a config, with its family's additions: rotary embeddings have values, other
    parameters and buffers have no memory.

    Args:
        family: Family of the config; None for that of its model type.
    """
    family = family_of(config) if family is None else family
    with torch.device("meta"):
        model = family.new_model(config).eval()
        family.extend(model)
    if hasattr(model.model, "rotary_emb"):
        rotary = model.model.rotary_emb = type(model.model.rotary_emb)(config)
        if rotary.rope_type == "longrope":  # its two lists are equal (`check_rope_fields`), so no length chooses one
            rotary.rope_type = "default"
    return model


def published_shapes(model: Any, names: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights by the names that checkpoints have for them: a matrix for each expert,
    but where names have all experts of a layer in one tensor.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for prefix, experts in _mixtures(model):
        if f"{prefix}.down_proj" in names:
            continue
        num_experts, hidden_size, size = experts.down_proj.shape
        del shapes[f"{prefix}.down_proj"], shapes[f"{prefix}.gate_up_proj"]
        for number in range(num_experts):
            shapes |= dict.fromkeys(
                (f"{prefix}.{number}.{name}_proj.weight" for name in ("gate", "up")), (size, hidden_size)
            )
            shapes[f"{prefix}.{number}.down_proj.weight"] = hidden_size, size
    return shapes


def part_of(name: str) -> str:
    """Return the layer that a tensor belongs to, or the module if it is in none: the beginning of its name."""
    match = _PART.match(name)
    return match[0] if match else name


def check_shapes(model: Any, checkpoint: Checkpoint, routing: Routing, mtp_shapes: Shapes) -> None:
    """Raise ValueError for a weight that is missing or of another shape than the model's, and for surplus experts.

    Args:
        mtp_shapes: Shapes of the MTP module's weights that the model lacks; empty without a module.
    """
    if missing := mtp_shapes.keys() - checkpoint.names:
        raise ValueError(f"checkpoint: tensor {min(missing)} of the MTP module is missing: {NO_MTP}")
    num_experts = {prefix: len(experts.down_proj) for prefix, experts in _mixtures(model)}
    zero_experts = getattr(model.config, "zero_expert_num", None) or 0
    for name in checkpoint.names:
        prefix, digits = found.groups() if (found := _EXPERT.match(name)) else ("", "0")
        if prefix in num_experts and int(digits) >= num_experts[prefix] + zero_experts:
            raise ValueError(
                f"checkpoint: tensor {name} is one too many; the model's config has n_routed_experts "
                f"{num_experts[prefix]}"
            )
    shapes = published_shapes(model, checkpoint.names) | mtp_shapes
    checkpoint.check_shapes(shapes)
    # Attention layers check their own weights: some layers of GLM-5 have no indexer.
    missing = {name for name in shapes.keys() - checkpoint.names if ".self_attn." not in name}
    if model.config.tie_word_embeddings:
        missing -= {"lm_head.weight"}
    if not routing.needs_bias:
        missing = {name for name in missing if not name.endswith(routing.bias)}
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"checkpoint: tensor {min(missing)} is missing{more}")


def _mixtures(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules that hold all experts of a layer, each with its name."""
    return ((name, module) for name, module in model.named_modules() if name.endswith(".experts"))
