"""Kimi-K3's weights that Kimi Linear does not have, and its decoder."""

from typing import Any, NamedTuple

import torch
from torch import nn

from dcpmla.integrations.parts import Parts
from dcpmla.model.sum_decoder import SumBlock, SumDecoder
from dcpmla.model.sums import Mixer


class K3Fields(NamedTuple):
    """Kimi-K3's fields of a config, which Kimi Linear's need not have.

    Attributes:
        group_size: Layers of a group, whose outputs have a sum of their own; None for one sum of all.
        latent_size: Width of the routed experts' rows; None for the hidden size.
        has_latent_norm: Whether the sum of routed experts is normed.
        gates_output: Whether MLA has a gate for each column of its output.
        has_full_gate: Whether gates of linear attention are projected at once, not through a low rank.
        decay_floor: Same as in `DeltaConfig`.
    """

    group_size: int | None
    latent_size: int | None
    has_latent_norm: bool
    gates_output: bool
    has_full_gate: bool
    decay_floor: float | None

    @classmethod
    def of(cls, config: Any) -> "K3Fields":
        """Return the fields of a transformers config."""
        linear = getattr(config, "linear_attn_config", None) or {}
        return cls(
            getattr(config, "attn_res_block_size", None),
            getattr(config, "routed_expert_hidden_size", None),
            getattr(config, "latent_moe_use_norm", False),
            getattr(config, "mla_use_output_gate", False),
            linear.get("use_full_rank_gate", False),
            linear.get("gate_lower_bound"),
        )


def extend_to_k3(model: Any) -> None:
    """Change modules of transformers' Kimi Linear into Kimi-K3's, by the config's fields."""
    config, fields = model.config, K3Fields.of(model.config)
    for layer in model.model.layers:
        if fields.group_size is not None:
            _add_mixture(layer, "self_attention_res", config.hidden_size)
            _add_mixture(layer, "mlp_res", config.hidden_size)
        is_linear = hasattr(layer.self_attn, "g_a_proj")
        if is_linear and fields.has_full_gate:
            del layer.self_attn.g_a_proj, layer.self_attn.g_b_proj
        if fields.has_full_gate if is_linear else fields.gates_output:
            width = layer.self_attn.o_proj.in_features
            layer.self_attn.g_proj = nn.Linear(config.hidden_size, width, bias=False)
        if fields.latent_size is not None and hasattr(layer.mlp, "experts"):
            _narrow_experts(layer.mlp, config.hidden_size, fields.latent_size, fields.has_latent_norm)
    if fields.group_size is not None:
        _add_mixture(model.model, "output_attn_res", config.hidden_size)


def _add_mixture(module: nn.Module, name: str, hidden_size: int) -> None:
    module.add_module(f"{name}_norm", nn.RMSNorm(hidden_size))
    module.add_module(f"{name}_proj", nn.Linear(hidden_size, 1, bias=False))


def _narrow_experts(mlp: Any, hidden_size: int, width: int, has_norm: bool) -> None:
    """Give routed experts the width of latents, and the projections to latents and back."""
    num_experts, _, size = mlp.experts.down_proj.shape
    mlp.experts.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * size, width))
    mlp.experts.down_proj = nn.Parameter(torch.empty(num_experts, width, size))
    mlp.routed_expert_down_proj = nn.Linear(hidden_size, width, bias=False)
    mlp.routed_expert_up_proj = nn.Linear(width, hidden_size, bias=False)
    if has_norm:
        mlp.routed_expert_norm = nn.RMSNorm(width)


def load_sum_decoder(parts: Parts, num_layers: int) -> SumDecoder:
    """Load a decoder whose blocks come in groups."""
    group_size = K3Fields.of(parts.model.config).group_size
    assert group_size is not None

    def mixer(name: str, norm: str, stores: bool = False) -> Mixer:
        score = parts.vector(f"{name}_norm.weight").float() * parts.vector(f"{name}_proj.weight")[0].float()
        return Mixer(score, parts.vector(f"{norm}.weight"), parts.eps, stores)

    blocks = []
    for number, name in enumerate(parts.layer_names(num_layers)):
        attention, layer = parts.attention(f"{name}.self_attn")
        begins = number % group_size == 0
        to_attention = mixer(f"{name}.self_attention_res", f"{name}.input_layernorm", begins)
        to_mlp = mixer(f"{name}.mlp_res", f"{name}.post_attention_layernorm")
        blocks.append(SumBlock(layer, attention, parts.mlp(f"{name}.mlp"), (to_attention, to_mlp), parts.reduce))
    return SumDecoder(parts.vector("model.embed_tokens.weight"), blocks, mixer("model.output_attn_res", "model.norm"))
