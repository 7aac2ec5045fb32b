"""transformers' model without its attention, cut over the TP group by transformers' own tensor-parallel plan."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.distributed.configuration_utils import DistributedConfig

from dcpmla.integrations.checkpoint import Checkpoint
from dcpmla.integrations.experts import (
    check_experts,
    choose_implementation,
    experts_of,
    keep_own_routes,
    named_experts,
    spread_experts,
)
from dcpmla.integrations.static_experts import prepare_experts
from dcpmla.parallel.mesh import DCPMesh

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.")  # a tensor of one expert: its layer's prefix, its number


class Placeholder(nn.Module):
    """An empty module instead of an MLA module, so that transformers neither allocates nor loads that one."""


def is_attention(module: nn.Module) -> bool:
    """Tell whether a module of transformers' is self-attention that this package computes: MLA, or DeepSeek-V4's."""
    return hasattr(module, "kv_a_proj_with_mqa") or hasattr(module, "sinks")


def load_skeleton(
    directory: Path,
    checkpoint: Checkpoint,
    config: Any,
    mesh: DCPMesh,
    dtype: torch.dtype | None,
    device: torch.device,
    enable_expert_parallel: bool,
) -> Any:
    """Load a checkpoint with a `Placeholder` for every MLA module. Collective over the job, whose ranks must be the
    TP group.

    Args:
        checkpoint: the directory's.
        config: a transformers config.
        dtype: of the parameters; None takes the checkpoint's.
        enable_expert_parallel: spread experts whole over the ranks; dense and shared MLPs are cut either way.
    Raises:
        ValueError: experts that do not divide, no checkpoint, tensors that are missing or of another shape.
    """
    base: Any = getattr(transformers, f"{type(config).__name__.removesuffix('Config')}ForCausalLM")
    whole_experts = enable_expert_parallel and mesh.tp_size > 1

    class Skeleton(base):
        _keys_to_ignore_on_load_unexpected = [
            *(base._keys_to_ignore_on_load_unexpected or []),
            r"\.self_attn\.",
            r"\.zero_experts\.",
        ]

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            _check_shapes(self, checkpoint)
            for name, module in list(self.named_modules()):
                if is_attention(module):
                    self.set_submodule(name, Placeholder())
                elif hasattr(module, "zero_expert_num"):  # LongCat: see _without_zero_experts
                    module.gate_up_proj = nn.Parameter(module.gate_up_proj[: module.num_routed_experts])
            check_experts(self, mesh.tp_size, enable_expert_parallel)
            self._tp_plan = _plan_without_attention(self)
            if whole_experts:
                spread_experts(self)
            for experts in experts_of(self):
                prepare_experts(experts)

    # transformers' reports name the class, and it reads the source of the class's module to learn that experts can be
    # computed in groups.
    Skeleton.__name__, Skeleton.__module__ = base.__name__, base.__module__
    # transformers places a cut model itself: on the accelerator of LOCAL_RANK, or on the CPU where there is none.
    placement = (
        {"distributed_config": DistributedConfig(tp_size=mesh.tp_size)}
        if mesh.tp_size > 1
        else {"device_map": str(device)}
    )
    try:
        model, info = Skeleton.from_pretrained(
            str(directory),
            config=config,
            dtype=dtype or "auto",
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            key_mapping=_without_zero_experts(config),
            **placement,
        )
    except OSError as error:
        raise ValueError(
            f"model (--model): {directory} has no safetensors checkpoint that transformers can load ({error})"
        ) from error
    _check_loaded(info)
    if whole_experts:
        keep_own_routes(model, mesh.tp_rank, mesh.tp_size)
    else:
        choose_implementation(model, mesh.tp_size)
    return model.eval()


def _plan_without_attention(model: Any) -> dict[str, str]:
    """Return transformers' rules for all but attention; for shared experts, too, where it leaves them out (GLM-4)."""
    plan = {rule: style for rule, style in model._tp_plan.items() if ".self_attn." not in rule}
    if any(name.endswith(".shared_experts") for name, _ in model.named_modules()):
        shared = "model.layers.*.mlp.shared_experts"
        plan |= {f"{shared}.gate_proj": "colwise", f"{shared}.up_proj": "colwise", f"{shared}.down_proj": "rowwise"}
    return plan


def _without_zero_experts(config: Any) -> dict[str, str]:
    """Return how to rename the weights of LongCat's zero experts, so that they are not loaded.

    They are the identity: published checkpoints have no such weights, those that transformers saves do.
    """
    zero_experts = [
        str(config.n_routed_experts + number) for number in range(getattr(config, "zero_expert_num", None) or 0)
    ]
    return {rf"\.mlp\.experts\.({'|'.join(zero_experts)})\.": r".mlp.zero_experts.\1."} if zero_experts else {}


def _check_shapes(model: Any, checkpoint: Checkpoint) -> None:
    """Raise ValueError for a weight of another shape than the model's, and for missing or surplus experts.

    transformers itself joins whatever weights it finds for a layer's experts, and cuts what it has joined.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    num_experts: dict[str, int] = {}
    for prefix, experts in named_experts(model):
        num_experts[prefix], hidden_size, size = experts.down_proj.shape
        for number, weight in product(range(num_experts[prefix]), ("gate_proj", "up_proj", "down_proj")):
            name = f"{prefix}.{number}.{weight}.weight"
            shapes[name] = (hidden_size, size) if weight == "down_proj" else (size, hidden_size)
            if name not in checkpoint.names and f"{prefix}.down_proj" not in checkpoint.names:
                raise ValueError(f"checkpoint: tensor {name} is missing")
    zero_experts = getattr(model.config, "zero_expert_num", None) or 0
    for name in checkpoint.names:
        prefix, digits = found.groups() if (found := _EXPERT.match(name)) else ("", "0")
        if prefix in num_experts and int(digits) >= num_experts[prefix] + zero_experts:
            raise ValueError(
                f"checkpoint: tensor {name} is one too many; the model's config has n_routed_experts "
                f"{num_experts[prefix]}"
            )
    checkpoint.check_shapes(shapes)


def _check_loaded(info: dict[str, Any]) -> None:
    """Raise ValueError for what a checkpoint lacks: transformers fills it with random numbers."""
    if info["missing_keys"]:
        raise ValueError(
            f"checkpoint: {len(info['missing_keys'])} tensors are missing, the first is {min(info['missing_keys'])}"
        )
    if info["mismatched_keys"]:  # of a tensor that transformers renames, or joins from others
        name, found, expected = min(info["mismatched_keys"])
        raise ValueError(
            f"checkpoint: tensor {name} has shape {tuple(found)}; the model's config asks for {tuple(expected)}"
        )
