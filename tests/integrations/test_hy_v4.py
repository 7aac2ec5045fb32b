"""HY V4: published names, also of weights in block fp8, and the text model of HY V4 VL; against transformers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.integrations.test_quantized_families import check as check_quantized
from tests.integrations.test_quantized_families import outcome
from tests.integrations.test_transformers import check, make_cases
from tests.planning.test_plan_truth import check as check_bytes
from tests.support.models import MLA_FAMILIES, random_model, save_tiny, tiny_config
from tests.support.quantized_models import save_wide, write_dequantized, write_quantized
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif("hy_v4" not in MLA_FAMILIES, reason="needs a transformers with HY V4")
needs_vl = pytest.mark.skipif(not hasattr(transformers, "HYV4VLTextConfig"), reason="needs transformers 5.24")


def published_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a saved model's tensors as they are published: a matrix for each expert, names of Tencent's modules."""
    published = {}
    for saved, tensor in tensors.items():
        name = saved.replace(".hc_pre", "").replace("_layer.hc_", "_layer.hc_pre.hc_")
        name = name if ".self_attn." in name else name.replace("linear_gate", "gate_proj")
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            prefix = name.rpartition(".")[0]
            parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            for number, expert in enumerate(tensor):
                matrices = zip(parts, expert.chunk(len(parts)), strict=True)
                published |= {f"{prefix}.{number}.{part}.weight": matrix.clone() for part, matrix in matrices}
        else:
            published[name] = tensor
    return published


def rewrite_weights(directory: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_published_names(tmp_path: Path) -> None:
    model = save_tiny("hy_v4", tmp_path)
    tensors = published_names(load_file(tmp_path / "model.safetensors"))
    assert {
        "model.hc_head.hc_head_fn",
        "model.layers.0.hc_attn_layer.hc_pre.hc_base",
        "model.layers.1.self_attn.learnable_sink_param",
        "model.layers.2.self_attn.linear_gate.weight",
        "model.layers.2.mlp.experts.3.up_proj.weight",
    } <= set(tensors)
    rewrite_weights(tmp_path, tensors)
    check(model, tmp_path, 1, make_cases(1, [1], (2,), ("auto",)))


@needs_vl
def test_the_text_model_of_vl(tmp_path: Path) -> None:
    """Its latents' norms have the config's eps, and its tensors another prefix, as transformers saves them."""
    from transformers.models.hy_v4_vl import HYV4VLTextConfig
    from transformers.models.hy_v4_vl.modeling_hy_v4_vl import HYV4VLTextModel

    tiny = random_model(tiny_config("hy_v4"))
    fields = tiny.config.to_dict() | {"rms_norm_eps": 1e-2}
    fields["rope_parameters"] = fields["rope_parameters"] | {"mrope_section": [2, 1, 1]}
    del fields["model_type"]
    config = HYV4VLTextConfig(**fields, attn_implementation="eager")
    text = HYV4VLTextModel(config).eval()
    text.load_state_dict(tiny.model.state_dict())
    tensors = {f"model.language_model.{name}": tensor for name, tensor in text.state_dict().items()}
    rewrite_weights(
        tmp_path, tensors | {"lm_head.weight": tiny.lm_head.weight.data, "model.vision_tower.x": torch.ones(2)}
    )
    wrapper = {"model_type": "hy_v4_vl", "text_config": json.loads(config.to_json_string(use_diff=False))}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))

    def reference(token_ids: Tensor) -> Any:
        return SimpleNamespace(logits=tiny.lm_head(text(token_ids).last_hidden_state))

    check(reference, tmp_path, 1, make_cases(1, [1], (1,), ("auto",)))


def stack_experts(directory: Path) -> None:
    """Stack experts as transformers' model reads them."""
    tensors = load_file(directory / "model.safetensors")
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{number}.{part}_proj.weight") for number in range(4)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{prefix}gate_up_proj": torch.cat([gate, up], 1), f"{prefix}down_proj": down}
    rewrite_weights(directory, tensors)


@pytest.mark.parametrize("scheme", ["block", "compressed_block"])
def test_block_fp8(scheme: str, tmp_path: Path) -> None:
    """The indexer's rotated columns come first without leaving their blocks."""
    wide, twin = tmp_path / "wide", tmp_path / "twin"
    model_class = type(save_wide("hy_v4", wide))
    tensors = published_names(load_file(wide / "model.safetensors"))
    rewrite_weights(wide, {name.replace("linear_gate", "gate_proj"): tensor for name, tensor in tensors.items()})
    write_quantized(wide, tmp_path / "fp8", scheme)
    write_dequantized(wide, twin, scheme)
    stack_experts(twin)
    results = run_ranks(2, outcome, tmp_path / "fp8", 2, False)
    check_quantized(results, model_class.from_pretrained(twin, dtype=torch.float32).eval())
    assert {kind for _, experts, *_ in results for kind in experts} == {"fp8"}
    check_bytes([tmp_path / "fp8"], 2)
