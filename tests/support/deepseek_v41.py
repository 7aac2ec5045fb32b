"""DeepSeek-V4.1's text model in float64 over the tensors of a checkpoint, by their published names.

transformers has no such model. Formulas follow vLLM's model; nothing of the package is used.
Hashes of n-grams are an argument, as they follow from a tokenizer.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class DeepseekV41:
    """A model of a checkpoint's tensors.

    Args:
        config: Fields of the config's text_config.
        angles: Frequencies [rope_dim / 2] of layers without entries, and of layers with them.
    """

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], angles: tuple[Tensor, Tensor]) -> None:
        self.config, self.tensors = config, {name: tensor.double() for name, tensor in tensors.items()}
        self.angles, self.eps = angles, config["rms_norm_eps"]
        self.inputs: dict[int, Tensor] = {}  # means of the streams before each layer, after its memory
        self.entries: dict[int, tuple[Tensor, Tensor]] = {}  # a source's rows and index keys
        self.chosen: dict[int, Tensor] = {}
        self.candidates: Tensor | None = None

    def __call__(self, ids: Tensor, hashes: dict[int, Tensor]) -> Tensor:
        """Return logits [T, vocab] of token ids [T].

        Args:
            hashes: Rows of a layer's table [T, columns], by the layer.
        """
        num_streams = self.config["hc_mult"]
        streams = self.tensors["embed.weight"][ids][:, None].repeat(1, num_streams, 1)
        pre = F.one_hot(torch.zeros(len(ids), dtype=torch.long), num_streams).double()
        for layer in range(self.config["num_hidden_layers"]):
            if layer in hashes:
                streams = self.add_memory(layer, streams, hashes[layer])
            self.inputs[layer] = streams.mean(1)
            for part, compute in (("attn", self.attend), ("ffn", self.route)):
                following, post, comb = self.weights_of(f"layers.{layer}.hc_{part}", streams)
                x = self.norm((pre[..., None] * streams).sum(1), f"layers.{layer}.{part}_norm")
                out = compute(layer, x)
                streams = comb.transpose(1, 2) @ streams + post[..., None] * out[:, None]
                pre = following
        return self.norm((pre[..., None] * streams).sum(1), "norm") @ self.tensors["head.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Normalize the last dimension of x."""
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Multiply x by a weight."""
        return x @ self.tensors[f"{name}.weight"].T

    def weights_of(self, name: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights of the next part's input [T, S], of the output [T, S], and of streams [T, S, S]."""
        num, eps, flat = streams.shape[1], self.config["hc_eps"], streams.flatten(1)
        scale = self.tensors[f"{name}_scale"].repeat_interleave(torch.tensor([num, num, num * num]))
        numbers = F.rms_norm(flat, flat.shape[-1:], eps=self.eps) @ self.tensors[f"{name}_fn"].T
        pre, post, comb = (numbers * scale + self.tensors[f"{name}_base"]).split([num, num, num * num], 1)
        comb = comb.view(-1, num, num).softmax(2) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return pre.sigmoid() + eps, 2 * post.sigmoid(), comb

    def add_memory(self, layer: int, streams: Tensor, hashes: Tensor) -> Tensor:
        """Add the value of n-grams to each stream, by the likeness of the stream and its key."""
        name, (num_tokens, num_streams, width) = f"layers.{layer}.engram", streams.shape
        rows = self.tensors[f"{name}.embed.weight"][hashes].flatten(1)
        keys, value = self.linear(rows, f"{name}.wkv").split([num_streams * width, width], 1)
        keys = F.rms_norm(keys.view(num_tokens, num_streams, width), [width], eps=self.eps)
        queries = F.rms_norm(streams, [width], eps=self.eps) * self.tensors[f"{name}.q_weight"]
        likeness = (queries * keys * self.tensors[f"{name}.k_weight"]).sum(2) / width**0.5
        root = likeness.abs().clamp(min=1e-6).sqrt()
        gate = torch.where(likeness < 0, -root, root).sigmoid()
        return streams + gate[..., None] * value[:, None]

    def attend(self, layer: int, x: Tensor) -> Tensor:
        """Return the output of a layer's attention to its window and to its source's entries."""
        config, name, num_tokens = self.config, f"layers.{layer}.attn", len(x)
        ratio, position = config["compress_ratios"][layer], torch.arange(num_tokens)
        angles = position[:, None] * self.angles[ratio > 0].double()
        latent = self.norm(self.linear(x, f"{name}.wq_a"), f"{name}.q_norm")
        q = rotate(self.linear(latent, f"{name}.wq_b").view(num_tokens, -1, config["head_dim"]), angles[:, None])
        rows = rotate(self.norm(self.linear(x, f"{name}.wkv"), f"{name}.kv_norm"), angles)
        distance = position[:, None] - position
        is_seen = (distance >= 0) & (distance < config["sliding_window"])
        if ratio:
            if layer in config["kv_source_layer_ids"]:
                self.entries[layer] = self._compress(name, x, ratio, angles)
            entries, keys = self.entries[max(s for s in config["kv_source_layer_ids"] if s <= layer)]
            if layer in config["index_source_layer_ids"]:
                self.chosen[layer] = self._choose(layer, x, latent, keys, angles)
            chosen = self.chosen[max(s for s in config["index_source_layer_ids"] if s <= layer)]
            rows, is_seen = torch.cat([rows, entries]), torch.cat([is_seen, chosen], 1)
        return self.project(name, q, rows, angles[:, None], is_seen)

    def project(self, name: str, q: Tensor, rows: Tensor, angles: Tensor, is_seen: Tensor | None = None) -> Tensor:
        """Return the output of attention of queries [T, heads, D] to rows [S, D], all of them or those that are seen.

        Args:
            angles: Angles of the queries [T, 1, R / 2].
            is_seen: [T, S].
        """
        config, num_tokens = self.config, len(q)
        scores = torch.einsum("thd,sd->ths", q, rows) * config["head_dim"] ** -0.5
        if is_seen is not None:
            scores = scores.masked_fill(~is_seen[:, None], -torch.inf)
        sinks = self.tensors[f"{name}.attn_sink"].expand(num_tokens, -1)[..., None]
        out = torch.cat([scores, sinks], 2).softmax(2)[..., :-1] @ rows
        out = rotate(out, -angles).reshape(num_tokens, config["o_groups"], -1)
        to_latent = self.tensors[f"{name}.wo_a.weight"].unflatten(0, (config["o_groups"], -1))
        return self.linear(torch.einsum("tgd,grd->tgr", out, to_latent).flatten(1), f"{name}.wo_b")

    def _compress(self, name: str, x: Tensor, ratio: int, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries of whole spans, and their index keys, rotated as the first token of the span."""
        num = len(x) // ratio
        values = self.linear(x, f"{name}.compressor.wkv")[: num * ratio].unflatten(0, (num, ratio))
        if ratio > 1:
            gates = self.linear(x, f"{name}.compressor.wgate")[: num * ratio].unflatten(0, (num, ratio))
            values = values * gates.softmax(1)
        latent = self.norm(values.sum(1), f"{name}.compressor.norm")
        keys = self.norm(self.linear(latent, f"{name}.indexer.wk"), f"{name}.indexer.k_norm")
        first = angles[: num * ratio : ratio]
        return rotate(latent, first), rotate(keys, first)

    def _choose(self, layer: int, x: Tensor, latent: Tensor, keys: Tensor, angles: Tensor) -> Tensor:
        """Return whether each token attends to each entry, and note the candidate blocks of their source."""
        config, name, num_tokens = self.config, f"layers.{layer}.attn.indexer", len(x)
        num_heads, width = config["index_n_heads"], config["index_head_dim"]
        q = rotate(self.linear(latent, f"{name}.wq_b").view(num_tokens, num_heads, width), angles[:, None])
        weights = self.linear(x, f"{name}.weights_proj") * (num_heads * width) ** -0.5
        scores = torch.einsum("thd,sd->ths", q, keys).relu().mul(weights[..., None]).sum(1)
        num_complete = (torch.arange(num_tokens) + 1) // config["compress_ratios"][layer]
        scores = scores.masked_fill(torch.arange(len(keys)) >= num_complete[:, None], -torch.inf)
        size, source = config["candidate_block_size"], config["candidate_source_layer_id"]
        if layer == source:
            padded = F.pad(scores, (0, size - len(keys) % size), value=-torch.inf)
            best = padded.unflatten(1, (-1, size)).amax(2)
            newest = (num_complete - 1).clamp(min=0) // size
            best.scatter_(1, newest[:, None], torch.inf)  # the newest block is always a candidate
            blocks = _largest(best, config["candidate_topk_blocks"])
            self.candidates = blocks.repeat_interleave(size, 1)[:, : len(keys)]
        elif 0 <= source < layer:
            assert self.candidates is not None
            scores = scores.masked_fill(~self.candidates, -torch.inf)
        return _largest(scores, config["index_topk"]) & (scores > -torch.inf)

    def route(self, layer: int, x: Tensor) -> Tensor:
        """Return the output of a layer's experts."""
        config, name = self.config, f"layers.{layer}.ffn"
        scores = F.softplus(self.linear(x, f"{name}.gate")).sqrt()
        chosen = _largest(scores + self.tensors[f"{name}.gate.bias"], config["num_experts_per_tok"])
        weights = scores * chosen / (scores * chosen).sum(1, keepdim=True) * config["routed_scaling_factor"]
        out = self._mlp(f"{name}.shared_experts", x)
        for expert in range(config["n_routed_experts"]):
            out = out + weights[:, expert, None] * self._mlp(f"{name}.experts.{expert}", x)
        return out

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        limit = self.config["swiglu_limit"]
        gate, up = self.linear(x, f"{name}.w1").clamp(max=limit), self.linear(x, f"{name}.w3").clamp(-limit, limit)
        return self.linear(F.silu(gate) * up, f"{name}.w2")


def _largest(scores: Tensor, num: int) -> Tensor:
    """Return whether each score is among the num largest of its row, of equal ones the first."""
    index = scores.sort(dim=1, descending=True, stable=True).indices[:, :num]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, index, True)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the last columns of x as pairs (2i, 2i + 1) by angles [..., R / 2]."""
    kept, pairs = x.split([x.shape[-1] - 2 * angles.shape[-1], 2 * angles.shape[-1]], -1)
    even, odd, cos, sin = pairs[..., ::2], pairs[..., 1::2], angles.cos(), angles.sin()
    return torch.cat([kept, torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)], -1)
