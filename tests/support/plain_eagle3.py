"""An EAGLE3 head in plain torch, around transformers' own attention and MLP of DeepSeek-V3, or of Llama."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import VOCAB_SIZE, random_model, tiny_config

DRAFT_VOCAB = 96
_SIZES = {
    **{"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 8, "num_key_value_heads": 8},
    **{"num_hidden_layers": 1, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 256},
    **{"rms_norm_eps": 1e-5, "initializer_range": 0.3, "tie_word_embeddings": False},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
}
_MLA_SIZES = {
    **{"kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10},
    "first_k_dense_replace": 1,
}
_DENSE_SIZES = {"head_dim": 12, "attention_bias": False}


class PlainEagle3:
    """The published formula (EAGLE-3; heads for Kimi-K2.5): the first draft after the model's hidden states, each
    later one after the layer's own.

    Args:
        base: transformers' model.
        inputs: Numbers of the layers whose inputs the head takes; that of the layer after the last is its output.
        tokens: Tokens of the draft's vocabulary; None for random ones.
        is_dense: Whether it has Llama's attention; else MLA.
        fields: Fields of the head's config, flags among them.
    """

    def __init__(
        self,
        base: Any,
        inputs: tuple[int, ...],
        seed: int = 0,
        tokens: Sequence[int] | None = None,
        is_dense: bool = False,
        **fields: Any,
    ) -> None:
        self.base, self.inputs, self.fields, self.is_dense = base, inputs, fields, is_dense
        sizes = _SIZES | (_DENSE_SIZES if is_dense else _MLA_SIZES)
        sizes |= {name: value for name, value in fields.items() if name in sizes}
        new_config = transformers.LlamaConfig if is_dense else transformers.DeepseekV3Config
        config = new_config(**sizes, attn_implementation="eager")
        self.draft_vocab = fields.get("draft_vocab_size", VOCAB_SIZE)
        self.head = random_model(config, seed)
        layer, size = self.head.model.layers[0], config.hidden_size
        generator = torch.Generator().manual_seed(seed)
        for name in ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"):
            if (narrow := getattr(layer.self_attn, name, None)) is not None:
                linear = nn.Linear(2 * size, narrow.out_features, bias=False)
                linear.weight.data = torch.randn(linear.weight.shape, generator=generator) * 0.2
                setattr(layer.self_attn, name, linear)
        self.layer, self.norm, self.rotary = layer, self.head.model.norm, self.head.model.rotary_emb
        self.own = {
            "fc.weight": torch.randn(size, len(inputs) * size, generator=generator) * 0.1,
            "midlayer.hidden_norm.weight": torch.rand(size, generator=generator) + 0.5,
            "lm_head.weight": torch.randn(self.draft_vocab, size, generator=generator),
        }
        if fields.get("fc_norm"):
            norms = {
                f"fc_norm.{part}.weight": torch.rand(size, generator=generator) + 0.5 for part in range(len(inputs))
            }
            self.own |= norms
        self.tokens = torch.randperm(VOCAB_SIZE, generator=generator)[: self.draft_vocab].sort().values
        if tokens is not None:
            self.tokens = torch.tensor(tokens)

    def save(self, directory: Path, has_embedding: bool = True) -> Path:
        """Write it as heads are published."""
        directory.mkdir()
        config = json.loads(self.head.config.to_json_string()) | self.fields
        config["architectures"] = ["LlamaForCausalLMEagle3" if self.is_dense else "Eagle3DeepseekV2ForCausalLM"]
        config["dtype"] = "float32"
        (directory / "config.json").write_text(json.dumps(config))
        state = {name.replace("model.layers.0.", "midlayer."): value for name, value in self.head.state_dict().items()}
        state = {name.removeprefix("model."): value for name, value in state.items()} | self.own
        if self.draft_vocab != VOCAB_SIZE:
            state["d2t"] = self.tokens - torch.arange(self.draft_vocab)
            state["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, self.tokens, True)
        if not has_embedding:
            del state["embed_tokens.weight"]
            self.head.model.embed_tokens.weight.data = self.base.model.embed_tokens.weight.data
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / "model.safetensors")
        return directory

    @torch.no_grad()
    def logits(self, tokens: list[int], num_drafts: int) -> Tensor:
        """Return the logits of each draft [num_drafts, draft vocab], each after the best drafts before it."""
        states = self.states(torch.tensor([tokens]))[:, :-1]
        tokens, rows = list(tokens), []
        for _ in range(num_drafts):
            normed, own = self.run(torch.tensor([tokens[1:]]), states)
            rows.append(normed[0, -1] @ self.own["lm_head.weight"].T)
            tokens.append(int(self.tokens[rows[-1].argmax()]))
            states = torch.cat([states, own[:, -1:]], 1)
        return torch.stack(rows)

    def drafts(self, tokens: list[int], num_drafts: int) -> list[int]:
        """Draft after tokens, with all of the head's states computed anew each time."""
        return [int(token) for token in self.tokens[self.logits(tokens, num_drafts).argmax(-1)]]

    def states(self, tokens: Tensor) -> Tensor:
        """Return projections [B, T, hidden] of the model's hidden states."""
        seen: dict[int, Tensor] = {}
        layers = self.base.model.layers
        hooks = [
            layers[number - 1].register_forward_hook(
                lambda _, args, out, number=number: seen.update({number: out[0] if isinstance(out, tuple) else out})
            )
            for number in self.inputs
        ]
        self.base.model(tokens)
        for hook in hooks:
            hook.remove()
        parts = [seen[number] for number in self.inputs]
        if self.fields.get("fc_norm"):
            parts = [self._norm(part, f"fc_norm.{index}.weight") for index, part in enumerate(parts)]
        return torch.cat(parts, -1) @ self.own["fc.weight"].T

    def run(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states [B, T, hidden] for the head, and for the next draft."""
        size = tokens.shape[1]
        embedded = self.layer.input_layernorm(self.head.model.embed_tokens(tokens))
        normed = self._norm(states, "midlayer.hidden_norm.weight")
        residual = normed if self.fields.get("norm_before_residual") else states
        x = torch.cat([embedded, normed], -1)
        positions = torch.arange(size)[None]
        mask = torch.zeros(size, size).masked_fill(torch.ones(size, size).triu(1).bool(), -torch.inf)[None, None]
        angles = self.rotary(x, positions)
        attended = self.layer.self_attn(x, attention_mask=mask, position_embeddings=angles, position_ids=positions)[0]
        residual = residual + attended
        residual = residual + self.layer.mlp(self.layer.post_attention_layernorm(residual))
        normed = self.norm(residual)
        return normed, normed if self.fields.get("norm_output") else residual

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.own[name], self.head.config.rms_norm_eps)


def base_model(family: str = "deepseek_v3", num_layers: int = 4) -> Any:
    """Return a tiny model in float32 of several layers."""
    config = tiny_config(family)
    config.num_hidden_layers = num_layers
    return random_model(config)
