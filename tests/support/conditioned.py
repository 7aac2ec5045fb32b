"""Random models that are well conditioned: roundings stay small, and wrong attention or experts show in the logits.

- What a layer adds to the residual is scaled by 1 / sqrt(2 layers); a plain random model amplifies every rounding.
- The experts of a token follow from its embedding, with a wide gap to the others, so that a rounding changes none.
- Scores of attention have a standard deviation of 2, so that a token attends to dozens of keys all over its context.
- An indexer selects one of eight tokens with a wide gap to the others, whose attention is next to nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.models import random_model, tiny_config
from tests.support.quantized_models import write_dequantized, write_quantized

_STEEPNESS, _ATTENTION_GAIN, _GAP = 2.0, 3.0, 9.0


class Weights(NamedTuple):
    """Weights of a model.

    Attributes:
        directory: Name of the checkpoint's directory.
        twin: Name of the directory that holds the same values without codes.
        bound: Largest error of logits.
    """

    directory: str
    twin: str
    bound: float


# A rounding to bfloat16 is off by up to 2^-9, one to e4m3 by up to 2^-4. A branch has about six roundings, and is a
# fraction of the residual: 0.5 % to 1.5 % in bfloat16; in e4m3, which rounds the rows of all products but the head,
# 3 % to 5 %. A prompt without an eighth of its context is off by 8 % or more.
WEIGHTS = {
    "bfloat16": Weights("bfloat16", "bfloat16", 0.03),
    "block fp8": Weights("block fp8", "block fp8 twin", 0.065),
}


def save_models(family: str, sizes: Mapping[str, int], directory: Path) -> None:
    """Save a model with these fields of a config in the directories of WEIGHTS."""
    plain, quantized = WEIGHTS.values()
    conditioned_model(family, sizes).save_pretrained(directory / plain.directory)
    write_quantized(directory / plain.directory, directory / quantized.directory, "block")
    write_dequantized(directory / plain.directory, directory / quantized.twin, "block")


def conditioned_model(family: str, sizes: Mapping[str, int]) -> Any:
    """Return a transformers model in float32, its weights rounded to bfloat16, with these fields of a config."""
    config = tiny_config(family)
    for name, size in {**sizes, "initializer_range": 0.02}.items():
        if getattr(config, name, None) is not None:  # DeepSeek-V2 may have no q_lora_rank
            setattr(config, name, size)
    for name in ("layer_types", "mlp_layer_types", "indexer_types"):
        if types := getattr(config, name, None):  # further layers are of the last type
            setattr(
                config, name, types[: config.num_hidden_layers] + types[-1:] * (config.num_hidden_layers - len(types))
            )
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    model = random_model(config)
    _condition(model)
    return model


def _condition(model: Any) -> None:
    """Draw the weights of a random model again, as the module says, and round them to bfloat16."""
    config, generator = model.config, torch.Generator().manual_seed(2)
    branch = (2 * config.num_hidden_layers) ** -0.5
    gains = {"o_proj": _ATTENTION_GAIN * branch, "down_proj": branch, "q_proj": _STEEPNESS, "q_b_proj": _STEEPNESS}
    gate = torch.linalg.qr(torch.randn(config.hidden_size, config.n_routed_experts, generator=generator))[0].T
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data.copy_(gate)
        elif parameter.ndim > 1:
            gain = next((gain for part, gain in gains.items() if part in name), 1.0)
            parameter.data.normal_(std=gain * parameter.shape[-1] ** -0.5, generator=generator)
    embedding = model.get_input_embeddings().weight.data.normal_(generator=generator)
    experts = torch.rand(len(embedding), len(gate), generator=generator).argsort(1)[:, : config.num_experts_per_tok]
    embedding += _GAP * gate[experts].sum(1) - embedding @ gate.T @ gate
    if hasattr(config, "index_topk"):
        _mark_salient(model, embedding, generator)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("correction_bias"):
            tensor.data *= 0.1  # less than the gap
        tensor.data.copy_(tensor.data.bfloat16())


def _mark_salient(model: Any, embedding: Tensor, generator: torch.Generator) -> None:
    """Make one of eight tokens salient: indexers select it, and attention all but ignores the other tokens.

    All tokens have one direction of hidden states in common, which becomes a constant part of queries. Salient tokens
    have another one, which becomes a part of their keys; the product of both is the gap.
    """
    config, latent, query_latent = model.config, model.config.kv_lora_rank, model.config.q_lora_rank

    def signs(num_columns: int) -> Tensor:
        return torch.randint(0, 2, (num_columns,), generator=generator) * 2.0 - 1.0

    everywhere, salient = torch.linalg.qr(torch.randn(config.hidden_size, 2, generator=generator))[0].T
    for direction, tokens in ((everywhere, embedding), (salient, embedding[::8])):
        embedding -= (embedding @ direction)[:, None] * direction
        tokens += _GAP * direction
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:  # layers do not add to both directions
            for direction in (everywhere, salient):
                parameter.data -= direction[:, None] * (direction @ parameter.data)[..., None, :]
        if name.endswith("gate.weight"):  # experts do not depend on them either
            for direction in (everywhere, salient):
                parameter.data -= (parameter.data @ direction)[:, None] * direction
    keys, scale = config.qk_nope_head_dim, config.qk_head_dim**-0.5
    part = (16 / (scale * (0.1 * _GAP) ** 2 * (latent * query_latent) ** 0.5)) ** 0.5  # a gap of 16 between scores
    for layer in model.model.layers:
        attention, indexer = layer.self_attn, layer.self_attn.indexer
        in_queries, in_keys, in_index = signs(query_latent), signs(latent), signs(config.index_head_dim)
        in_index[: config.qk_rope_head_dim] = 0  # RoPE would turn it
        attention.q_a_proj.weight.data += 0.1 * in_queries[:, None] * everywhere
        attention.kv_a_proj_with_mqa.weight.data[:latent] += 0.1 * in_keys[:, None] * salient
        pattern = part * keys**-0.5 * signs(keys)[:, None]
        for projection, columns in ((attention.q_b_proj, in_queries), (attention.kv_b_proj, in_keys)):
            heads = projection.weight.data.unflatten(0, (config.num_attention_heads, -1))
            heads[:, :keys] += pattern * columns * len(columns) ** -0.5
        indexer.weights_proj.weight.data += everywhere
        indexer.wk.weight.data += 0.3 * in_index[:, None] * salient
        heads = indexer.wq_b.weight.data.unflatten(0, (config.index_n_heads, -1))
        heads += 0.4 * in_index[:, None] * in_queries * query_latent**-0.5
