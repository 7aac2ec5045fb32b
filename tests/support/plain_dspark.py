"""DSpark modules by their published formulas, without a cache: DeepSeek-V4's around transformers' layers in float32,
V4.1's in float64 over the tensors of a checkpoint.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from dcpmla.integrations.families.table import family_of
from tests.support.deepseek_v41 import DeepseekV41, rotate
from tests.support.models import VOCAB_SIZE, random_model, tiny_config

NUM_BLOCKS = 3
FIELDS: dict[str, Any] = {
    "dspark_block_size": 5,
    "dspark_markov_rank": 6,
    "dspark_noise_token_id": VOCAB_SIZE - 2,
    "dspark_target_layer_ids": [1, 3],
}


def draft_from_left(
    base: Tensor, anchor: int, num_drafts: int, of_token: Callable[[int], Tensor], tokens: list[int] | None = None
) -> list[int]:
    """Choose drafts one by one, from logits [at least num_drafts, vocab] plus those that follow from the token before.

    Args:
        tokens: Tokens that may be drafted; None for all.
    """
    drafts = [anchor]
    for logits in base[:num_drafts]:
        biased = logits + of_token(drafts[-1])
        drafts.append(int(biased.argmax()) if tokens is None else tokens[int(biased[tokens].argmax())])
    return drafts[1:]


class PlainDSpark:
    """DeepSeek-V4's module, which takes the outputs of the model's layers.

    Args:
        fields: Fields of the config that differ from FIELDS.
    """

    def __init__(self, **fields: Any) -> None:
        self.config = tiny_config("deepseek_v4")
        for name, value in (FIELDS | fields).items():
            setattr(self.config, name, value)
        self.with_layers = random_model(family_of(self.config).with_mtp_layer(self.config), seed=1)
        self.base = random_model(self.config)
        state = self.with_layers.state_dict()
        self.base.load_state_dict({name: state[name] for name in self.base.state_dict()})
        size, rank, num = self.config.hidden_size, self.config.dspark_markov_rank, self.config.hc_mult
        last = f"mtp.{NUM_BLOCKS - 1}"
        shapes: dict[str, tuple[int, ...]] = {
            "mtp.0.main_proj.weight": (size, size * len(self.config.dspark_target_layer_ids)),
            "mtp.0.main_norm.weight": (size,),
            f"{last}.norm.weight": (size,),
            f"{last}.hc_head_fn": (num, num * size),
            f"{last}.hc_head_base": (num,),
            f"{last}.hc_head_scale": (1,),
            f"{last}.markov_head.markov_w1.weight": (VOCAB_SIZE, rank),
            f"{last}.markov_head.markov_w2.weight": (VOCAB_SIZE, rank),
            f"{last}.confidence_head.proj.weight": (1, size + rank),
        }
        generator = torch.Generator().manual_seed(2)
        self.own = {
            name: torch.rand(shape, generator=generator) + 0.5
            if len(shape) == 1
            else torch.randn(shape, generator=generator) * (1.0 if "markov" in name else 0.2)
            for name, shape in shapes.items()
        }

    def save(self, directory: Path) -> Path:
        """Write it as checkpoints are published."""
        state = self.with_layers.state_dict()
        for number in range(NUM_BLOCKS):
            block = f"model.layers.{self.config.num_hidden_layers + number}."
            state = {name.replace(block, f"mtp.{number}."): tensor for name, tensor in state.items()}
        directory.mkdir(parents=True)
        self.config.dtype = torch.float32
        self.config.save_pretrained(directory)
        tensors = {name: tensor.clone() for name, tensor in (state | self.own).items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    @torch.no_grad()
    def drafts(self, tokens: list[int], num_drafts: int) -> list[int]:
        """Draft after tokens, of which the last is the first of the block, and the others are the context."""
        context, size = self._context(tokens[:-1]), self.config.dspark_block_size
        ids = torch.tensor([[tokens[-1], *[self.config.dspark_noise_token_id] * (size - 1)]])
        streams = self.base.model.embed_tokens(ids)[:, :, None].repeat(1, 1, self.config.hc_mult, 1)
        for layer in self.with_layers.model.layers[-NUM_BLOCKS:]:
            post, comb, x = layer.attn_hc(streams)
            attended = self._attend(layer, context, layer.input_layernorm(x))
            streams = post[..., None] * attended[:, :, None] + comb.transpose(-1, -2) @ streams
            post, comb, x = layer.ffn_hc(streams)
            added = layer.mlp(layer.post_attention_layernorm(x))
            streams = post[..., None] * added[:, :, None] + comb.transpose(-1, -2) @ streams
        w1, w2 = (self._last(f"markov_head.markov_w{part}.weight") for part in (1, 2))
        base = self.base.lm_head(self._collapse(streams))[0]
        return draft_from_left(base, tokens[-1], num_drafts, lambda token: w2 @ w1[token])

    def _context(self, tokens: list[int]) -> Tensor:
        """Return the hidden states [1, T, hidden] that take the place of the layers' own for each token."""
        means: list[Tensor] = []
        layers = [self.base.model.layers[number] for number in self.config.dspark_target_layer_ids]
        hooks = [layer.register_forward_hook(lambda _module, _args, out: means.append(out.mean(2))) for layer in layers]
        self.base(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        return self._norm(torch.cat(means, -1) @ self.own["mtp.0.main_proj.weight"].T, "mtp.0.main_norm.weight")

    def _attend(self, layer: Any, context: Tensor, x: Tensor) -> Tensor:
        """Return attention of a block: each token sees the last tokens of the context, and the whole block."""
        num, size = context.shape[1], x.shape[1]
        positions = torch.arange(num + size)[None]
        is_seen = torch.eye(num + size, dtype=torch.bool)  # of the context's own rows nothing is used
        is_seen[num:, max(0, num - self.config.sliding_window) :] = True
        mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, -torch.inf)[None, None]
        rotary = self.base.model.rotary_emb
        angles = {kind: rotary(x, positions, layer_type=kind) for kind in ("main", "compress")}
        rows = torch.cat([context, x], 1)
        out = layer.self_attn(rows, position_embeddings=angles, position_ids=positions, attention_mask=mask)[0]
        return out[:, num:]

    def _collapse(self, streams: Tensor) -> Tensor:
        fn, base, scale = (self._last(f"hc_head_{part}") for part in ("fn", "base", "scale"))
        flat = streams.flatten(2)
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        weights = torch.sigmoid(flat @ fn.T * scale + base) + self.config.hc_eps
        return self._norm((weights[..., None] * streams).sum(2), f"mtp.{NUM_BLOCKS - 1}.norm.weight")

    def _last(self, name: str) -> Tensor:
        return self.own[f"mtp.{NUM_BLOCKS - 1}.{name}"]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.own[name], self.config.rms_norm_eps)


class PlainDSpark41:
    """DeepSeek-V4.1's module, which takes the inputs of the model's layers.

    Args:
        run: Function that runs a model over token ids [1, T].
        model: The model, with all tensors of its checkpoint.
    """

    def __init__(self, run: Callable[[Tensor], Any], model: DeepseekV41) -> None:
        self.run, self.model, config = run, model, model.config
        own = config | {
            "n_routed_experts": config["dspark_n_routed_experts"],
            "num_experts_per_tok": config["dspark_num_experts_per_tok"],
        }
        tensors = {name.replace("mtp.", "layers."): each for name, each in model.tensors.items() if "mtp." in name}
        self.module = DeepseekV41(own, tensors, model.angles)

    def drafts(self, tokens: list[int], num_drafts: int) -> list[int]:
        """Draft after tokens, of which the last is the first of the block, and the others are the context."""
        config, module, embedding = self.model.config, self.module, self.model.tensors["embed.weight"]
        self.run(torch.tensor([tokens[:-1]]))
        means = [self.model.inputs[layer] for layer in config["dspark_target_layer_ids"]]
        context = module.norm(module.linear(torch.cat(means, 1), "layers.0.main_proj"), "layers.0.main_norm")
        noise = [config["dspark_noise_token_id"]] * (config["dspark_block_size"] - 1)
        streams = embedding[torch.tensor([tokens[-1], *noise])][:, None].repeat(1, config["hc_mult"], 1)
        pre = F.one_hot(torch.zeros(len(streams), dtype=torch.long), config["hc_mult"]).double()
        for layer in range(NUM_BLOCKS):
            for part in ("attn", "ffn"):
                following, post, comb = module.weights_of(f"layers.{layer}.hc_{part}", streams)
                x = module.norm((pre[..., None] * streams).sum(1), f"layers.{layer}.{part}_norm")
                out = self._attend(layer, context, x) if part == "attn" else module.route(layer, x)
                streams = comb.transpose(1, 2) @ streams + post[..., None] * out[:, None]
                pre = following
        last = f"layers.{NUM_BLOCKS - 1}"
        base = module.norm((pre[..., None] * streams).sum(1), f"{last}.norm") @ self.model.tensors["head.weight"].T
        w1, w2 = (module.tensors[f"{last}.markov_head.{part}.weight"] for part in ("embed", "head"))
        return draft_from_left(base, tokens[-1], num_drafts, lambda token: w2 @ w1[token])

    def _attend(self, layer: int, context: Tensor, x: Tensor) -> Tensor:
        config, module, name = self.module.config, self.module, f"layers.{layer}.attn"
        positions = torch.arange(len(context) + len(x))
        angles = positions[:, None] * module.angles[0].double()
        own = angles[len(context) :, None]
        latent = module.norm(module.linear(x, f"{name}.wq_a"), f"{name}.q_norm")
        q = rotate(module.linear(latent, f"{name}.wq_b").view(len(x), -1, config["head_dim"]), own)
        rows = module.norm(module.linear(torch.cat([context, x]), f"{name}.wkv"), f"{name}.kv_norm")
        rows = rotate(rows, angles)[max(0, len(context) - config["sliding_window"]) :]
        return module.project(name, q, rows, own)
