"""DeepSeek's MTP module inside vLLM: a model that has one, what vLLM drafts with it, and the same in plain torch."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engines.conftest import save_model
from tests.support.plain_mtp import PlainMtp

NAME = "model.layers.2"  # after the model's two layers
DRAFTED: list[tuple[str, int, list[int]]] = []  # a request, how many tokens it had, and what vLLM drafted after them


def save_model_with_module(directory: Path, num_heads: int = 8, head_dim: int = 32, num_dense: int = 3) -> Path:
    """Save a model of two dense layers and a module with a third, which has experts if num_dense is 2; return its
    directory.
    """
    return make_module(save_model(directory, num_heads, head_dim, num_layers=3, num_dense=num_dense), draw_own())


def draw_own(generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Draw the weights that a module of width 128 has beside those of its layer."""
    norms = ("enorm", "hnorm", "shared_head.norm")
    own = {name: torch.rand(128, generator=generator) + 0.5 for name in norms}
    return own | {"eh_proj": torch.randn(128, 256, generator=generator) * 0.1}


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


class Module(PlainMtp):
    """The module of a saved model in plain torch, around transformers' own layer; nothing is cached."""

    def __init__(self, directory: str, masks_first: bool = True) -> None:
        self.masks_first, self.own = masks_first, load_file(Path(directory) / "model.safetensors")
        self.base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.with_layer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, num_hidden_layers=3)
        self.config = self.base.config
        self.use_layer()


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
