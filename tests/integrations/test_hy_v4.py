"""HY V4: published names, the text model of HY V4 VL, caches of 8 bits, block fp8, prefixes; against transformers.

test_transformers.py has more layouts.
"""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from tests.integrations.test_quantized_families import check as check_quantized
from tests.integrations.test_quantized_families import outcome, read_twin
from tests.integrations.test_transformers import check, make_cases, prompts
from tests.planning.test_plan_truth import check as check_bytes
from tests.support.layouts import dcp_config
from tests.support.models import MLA_FAMILIES, random_model, tiny_config
from tests.support.oracle import Oracle
from tests.support.quantized_models import save_wide, write_dequantized, write_quantized
from tests.support.ranks import run_ranks
from tests.support.whole_models import serve_layouts

pytestmark = pytest.mark.skipif("hy_v4" not in MLA_FAMILIES, reason="needs a transformers with HY V4")
needs_vl = pytest.mark.skipif(not hasattr(transformers, "HYV4VLTextConfig"), reason="needs transformers 5.24")
CONFIGS = Path(__file__).parents[1] / "planning" / "configs"


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


def test_published_names_beside_an_mtp_module(tmp_path: Path) -> None:
    """On four ranks, with keys whose norm depends on its eps."""
    model = random_model(tiny_config("hy_v4"))
    for name, weight in model.named_parameters():
        if name.endswith("indexer.wk.weight"):
            weight.data *= 1e-3
    model.save_pretrained(tmp_path)
    tensors = published_names(load_file(tmp_path / "model.safetensors"))
    assert {
        "model.hc_head.hc_head_fn",
        "model.layers.0.hc_attn_layer.hc_pre.hc_base",
        "model.layers.1.self_attn.learnable_sink_param",
        "model.layers.2.self_attn.linear_gate.weight",
        "model.layers.2.mlp.experts.3.up_proj.weight",
    } <= set(tensors)
    rewrite_weights(tmp_path, tensors | {"model.mtp_layers.0.eh_proj.weight": torch.ones(48, 96)})
    check(model, tmp_path, 4, make_cases(4, [4, 2], (2,), ("a2a",)))


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
    save_wide("hy_v4", wide)
    tensors = published_names(load_file(wide / "model.safetensors"))
    rewrite_weights(wide, {name.replace("linear_gate", "gate_proj"): tensor for name, tensor in tensors.items()})
    write_quantized(wide, tmp_path / "fp8", scheme)
    write_dequantized(wide, twin, scheme)
    stack_experts(twin)
    results = run_ranks(2, outcome, tmp_path / "fp8", 2, False)
    check_quantized(results, read_twin(twin))
    assert {kind for _, experts, *_ in results for kind in experts} == {"BlockFp8"}
    check_bytes([tmp_path / "fp8"], 2)


def test_bytes_in_bfloat16(tmp_path: Path) -> None:
    config = tiny_config("hy_v4")
    config.dtype = torch.bfloat16
    random_model(config).bfloat16().save_pretrained(tmp_path)
    check_bytes([tmp_path], 2)


def test_caches_of_8_bits_and_prefixes(tmp_path: Path) -> None:
    """Every token and every expert is selected, for rounded rows may change the choice."""
    config = tiny_config("hy_v4")
    config.index_topk, config.kv_lora_rank, config.num_experts_per_tok = 128, 128, 4
    reference = random_model(config)
    reference.save_pretrained(tmp_path)
    plain = dcp_config(2, 2, block_size=16, dcp_comm_backend="a2a")
    fp8 = replace(plain, kv_cache_dtype="fp8", kv_cache_scale=0.02, index_cache_dtype="fp8", index_hadamard=True)
    one, rows = (
        replace(fp8, decode_context_parallel_size=1),
        replace(fp8, kv_cache_dtype="fp8_ds_mla", kv_cache_scale=None),
    )
    exact, *rounded = run_ranks(2, serve_layouts, tmp_path, [plain, fp8, one, rows], prompts(), 2)[0]
    assert max(Oracle(reference).errors(prompts(), [exact])) < 1e-4
    assert max(Oracle(reference).errors(prompts(), rounded)) < 0.2


@needs_vl
def test_published_sizes() -> None:
    """The sizes are defaults of transformers' configs, whose layers with indexers are one, then every fourth."""
    for name, num_billions, num_selecting in (("hy_v4", 58, 10), ("hy_v4_vl", 770, 21)):
        config = load_config(CONFIGS / f"{name}.json")
        size = read_model(config)
        assert attention_of(config).num_index_layers == num_selecting
        assert round(sum(p.count * prod(p.shape) for p in size.parameters) / 1e9) == num_billions
