"""DeepSeek-V4's MTP module inside vLLM on a CPU: a model that has one, and what vLLM lacks to run it there."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engines.vllm_v4_model import CONFIG, MORE, published_name
from tests.support.plain_mtp import PlainStreamMtp

GUIDES: dict[str, list[int]] = {}  # all tokens of a request, by its name, to draft instead of the module's


class Module(PlainStreamMtp):
    """The module in plain torch."""

    masks_first = True

    def __init__(self) -> None:
        super().__init__("deepseek_v4", **CONFIG)


def save_v4_with_module(directory: Path) -> Path:
    """Save a model and its module by DeepSeek's names, and in the folder `reference` the model alone by transformers';
    return the directory.
    """
    module = Module()
    module.base.save_pretrained(directory / "reference")
    module.with_layer.save_pretrained(directory / "with_layer")
    saved = load_file(directory / "with_layer" / "model.safetensors")
    tensors = {published_name(name): tensor for name, tensor in saved.items()}
    last = f"layers.{module.config.num_hidden_layers}."
    tensors = {name.replace(last, "mtp.0."): tensor for name, tensor in tensors.items()}
    tensors |= {name: tensor.clone() for name, tensor in module.own.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "reference" / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | MORE | {"num_nextn_predict_layers": 1}))
    return directory


def use_plain_module() -> None:
    """Make vLLM run the module that it has for another platform over its model for CPUs."""
    from vllm.models import deepseek_v4
    from vllm.models.deepseek_v4.cpu import model

    class Layer(model.DeepseekV4DecoderLayer):
        def __init__(self, vllm_config: Any, prefix: str, topk_indices_buffer: Tensor, aux_stream_list: Any) -> None:
            super().__init__(vllm_config, prefix, topk_indices_buffer)

        def hc_post(self, x: Tensor, residual: Tensor | None, post: Any, comb: Any) -> Tensor:
            return x if residual is None else super().hc_post(x, residual, post, comb)  # None: it is done already

    model.DeepseekV4MoE.use_mega_moe, model.DeepseekV4MoE.finalize_mega_moe_weights = False, lambda self: None
    substitute = ModuleType("vllm.models.deepseek_v4.xpu.model")
    substitute.DeepseekV4DecoderLayer, substitute.make_deepseek_v4_expert_params_mapping = Layer, None
    sys.modules[substitute.__name__] = substitute
    mtp = importlib.import_module("vllm.models.deepseek_v4.xpu.mtp")
    deepseek_v4.DeepSeekV4MTP = mtp.DeepSeekV4MTP


def guide_drafts() -> None:
    """Draft the tokens of GUIDES, the last draft of every third step a wrong one, in place of the module's."""
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

    propose, steps = TargetDependentARSpeculator.propose, 0

    def guided(self: Any, *args: Any, **named: Any) -> Tensor:
        nonlocal steps
        drafts = propose(self, *args, **named)
        if named.get("dummy_run"):
            return drafts
        batch, num_rejected = args[0], args[6]
        known = (batch.seq_lens[: len(drafts)] - num_rejected + 1).tolist()
        for row, (name, num_known) in enumerate(zip(batch.req_ids, known, strict=False)):
            tokens = next((tokens for start, tokens in GUIDES.items() if name.startswith(start)), [])
            right = tokens[num_known : num_known + drafts.shape[1]]
            drafts[row, : len(right)] = torch.tensor(right, dtype=drafts.dtype)
            if steps % 3 == 2:
                drafts[row, -1] = (drafts[row, -1] + 1) % CONFIG["vocab_size"]
        steps += 1
        return drafts

    TargetDependentARSpeculator.propose = guided
