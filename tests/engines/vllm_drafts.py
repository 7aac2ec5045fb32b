"""DeepSeek's MTP module inside vLLM: a model that has one, what vLLM drafts with it, and the same in plain torch."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from tests.engines.conftest import save_model

NAME = "model.layers.2"  # after the model's two layers
DRAFTED: list[tuple[str, int, list[int]]] = []  # a request, how many tokens it had, and what vLLM drafted after them


def save_model_with_module(directory: Path, num_heads: int = 8, head_dim: int = 32, num_dense: int = 3) -> Path:
    """Save a model of two dense layers and a module with a third, which has experts if num_dense is 2; return its
    directory.
    """
    save_model(directory, num_heads, head_dim, num_layers=3, num_dense=num_dense)
    width = 128
    own = {name: torch.rand(width) + 0.5 for name in ("enorm", "hnorm", "shared_head.norm")}
    return make_module(directory, own | {"eh_proj": torch.randn(width, 2 * width) * 0.1})


def make_module(directory: Path, own: dict[str, Tensor]) -> Path:
    """Make a module of the third layer of a saved model, with these weights of its own; return the directory."""
    tensors = load_file(directory / "model.safetensors")
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    own = own | {"embed_tokens": embedding.clone(), "shared_head.head": head.clone()}
    tensors |= {f"{NAME}.{name}.weight": tensor for name, tensor in own.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def record_drafts() -> None:
    """Have vLLM's speculator write to DRAFTED."""
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

    propose = TargetDependentARSpeculator.propose

    def recorded(self: Any, *args: Any, **named: Any) -> Tensor:
        drafts = propose(self, *args, **named)
        if not named.get("dummy_run"):
            batch, _, _, _, _, num_sampled, num_rejected, *_ = args
            num_known = batch.seq_lens[: len(drafts)] - num_rejected + 1  # one of them sampled just now
            columns = (batch.req_ids, num_sampled.tolist(), num_known.tolist(), drafts.tolist())
            DRAFTED.extend((name, known, row) for name, sampled, known, row in zip(*columns, strict=False) if sampled)
        return drafts

    TargetDependentARSpeculator.propose = recorded


class Module:
    """The module in plain torch, around transformers' own layer; nothing is cached.

    Args:
        masks_first: zero the first position's embedding, as vLLM does: "not needed by MTP".
    """

    def __init__(self, directory: str, masks_first: bool = True) -> None:
        self.masks_first = masks_first
        self.base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, num_hidden_layers=3)
        self.layer = whole.model.layers[2]
        self.weights = load_file(Path(directory) / "model.safetensors")
        self.name, self.eps, self.embed = NAME, self.base.config.rms_norm_eps, self.base.model.embed_tokens

    @torch.inference_mode()
    def drafts(self, tokens: list[int], num_drafts: int) -> list[int]:
        """Return the drafts after tokens."""
        hidden = self.base.model(torch.tensor([tokens])).last_hidden_state[:, :-1]
        for _ in range(num_drafts):
            out = self._run(torch.tensor([tokens[1:]]), hidden)
            tokens = [*tokens, int(self.base.lm_head(out[0, -1]).argmax())]
            hidden = torch.cat([hidden, out[:, -1:]], 1)
        return tokens[-num_drafts:]

    def _run(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        embedded = self.embed(tokens)
        if self.masks_first:
            embedded[:, 0] = 0
        x = torch.cat([self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")], -1)
        return self._norm(self.attend(x @ self.weights[f"{self.name}.eh_proj.weight"].T), "shared_head.norm")

    def attend(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        angles = self.base.model.rotary_emb(x, positions)
        return self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{self.name}.{name}.weight"], self.eps)


def compare_drafts(module: Any, prompts: list[list[int]], outputs: list[Any]) -> dict[str, int]:
    """Return how many drafts vLLM made for requests named 1-0, 1-1 ..., and how many of them are the module's."""
    made, right = 0, 0
    for name, num_known, drafts in DRAFTED:
        run, index = map(int, name.split("-")[:2])
        tokens = prompts[index] + list(outputs[index].outputs[0].token_ids)
        if run == 1 and num_known <= len(tokens) and drafts[0] >= 0:  # -1 where it drafts nothing
            expected = module.drafts(tokens[:num_known], len(drafts))
            made, right = made + len(drafts), right + sum(map(int.__eq__, drafts, expected))
    return {"made": made, "right": right}
