"""Mistral Large 4's shared latents, formats of caches and weights, fields; test_transformers.py has more layouts."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcpmla import LLM
from dcpmla.config import DCPConfig
from dcpmla.integrations.families.table import attention_of, find_family
from dcpmla.integrations.model_files import load_config
from dcpmla.runtime.sampling import SamplingParams
from tests.integrations.test_graph_models import check_alike, serve_all
from tests.integrations.test_transformers import check, make_cases, prompts
from tests.planning.test_plan_truth import check as check_bytes
from tests.support.models import LARGE4_FAMILIES, random_model, tiny_config
from tests.support.oracle import Oracle
from tests.support.quantized_models import dequantize, quantize
from tests.support.ranks import run_ranks
from tests.support.whole_models import serve_layouts

pytestmark = pytest.mark.skipif(not LARGE4_FAMILIES, reason="needs a transformers with Mistral Large 4")
SHARING = {
    "num_hidden_layers": 6,
    "no_rope_layers": [1, 0, 1, 0, 1, 0],
    "kv_source_layers": [0, 1, 0, 1, 4, 1],  # layers 2, 3 and 5 reuse latents; 3 has no indexer, 3 and 5 no positions
    "indexer_types": ["full", "full", "full", "shared", "shared", "full"],
    "mlp_layer_types": ["dense"] + ["sparse"] * 5,
    "layer_types": ["indexed_attention"] * 6,
}
WIDE = {
    **{"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128, "qk_head_dim": 128, "index_head_dim": 128, "initializer_range": 0.05},
}


def save(directory: Path, **changes: Any) -> Any:
    config = tiny_config("mistral_large4_text")
    model = random_model(type(config)(**config.to_dict() | changes))
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("tp", [1, 2])
def test_layers_that_share_latents(tp: int, tmp_path: Path) -> None:
    reference = save(tmp_path, **SHARING)
    plan = attention_of(load_config(tmp_path)).plan_cache(DCPConfig(), [64], torch.float32)
    assert plan.bytes_per_token == 3 * 24 * 4 + 4 * 16 * 4  # latents of layers 0, 1 and 4; four layers' index keys
    check(reference, tmp_path, tp, make_cases(tp, [tp], (1, 2)[:tp], ("auto",)))


def test_graphs_of_layers_that_share_latents(tmp_path: Path) -> None:
    save(tmp_path, **SHARING)
    dcp = DCPConfig(block_size=4, cp_kv_cache_interleave_size=2, context_workspace_tokens=512)
    ((results,),) = run_ranks(1, serve_all, [tmp_path], dcp, False)
    check_alike(results[0], results[1:])


def test_a_prefix_is_reused(tmp_path: Path) -> None:
    reference = save(tmp_path, **SHARING)
    dcp = DCPConfig(tensor_parallel_size=2, decode_context_parallel_size=2, block_size=4, dcp_comm_backend="a2a")
    (answers,) = run_ranks(2, serve_layouts, tmp_path, [dcp], prompts()[4:], 2)[0]
    Oracle(reference).check(prompts()[4], *answers[0])


def test_caches_of_8_bits(tmp_path: Path) -> None:
    """Every token and every expert is selected, because rounding may change a choice."""
    reference = save(tmp_path, **WIDE, **SHARING, index_topk=128, num_experts_per_tok=4)
    sizes = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "block_size": 4}
    plain = DCPConfig(**sizes, dcp_comm_backend="a2a", index_cache_dtype="fp8", index_hadamard=True)
    scaled = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    formats = [{"kv_cache_dtype": "fp8_ds_mla"}, scaled, {**scaled, "decode_query_dtype": "fp8"}]
    layouts = [dataclasses.replace(plain, **fields) for fields in formats]
    results = run_ranks(2, serve_layouts, tmp_path, layouts, prompts())[0]
    assert max(Oracle(reference).errors(prompts(), results)) < 0.06


def test_weights_in_block_fp8(tmp_path: Path) -> None:
    """By Mistral's names; the reference has the dequantized values. W_UK stays in fp8 in layers without positions."""
    reference = save(tmp_path, **WIDE)
    tensors, stored = load_file(tmp_path / "model.safetensors"), {}
    for name, weight in tensors.items():
        is_matrix = name.startswith("layers.") and weight.ndim == 2 and "gate" not in name
        if not is_matrix or "weights_proj" in name:
            stored[name] = weight
            continue
        codes, scales = quantize(weight, (128, 128))
        stored |= {name: codes, f"{name}_scale_inv": scales}
        tensors[name] = dequantize(codes, scales, (128, 128))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference = type(reference).from_pretrained(tmp_path, dtype=torch.float32).eval()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    check(reference, tmp_path, 2, make_cases(2, [2], (1,), ("auto",)))
    check_bytes([tmp_path], 2)


def test_names_of_transformers(tmp_path: Path) -> None:
    """All experts of a layer are one tensor, projections have biases, and the drafts' module is not read."""
    reference = save(tmp_path, attention_bias=True)
    tensors = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    tensors["mtp_dspark.layers.0.wq.weight"] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check(reference, tmp_path, 1, make_cases(1, [1], (1,), ("auto",)))


@pytest.mark.usefixtures("one_process_on_cpu")
def test_a_config_alone_generates(tmp_path: Path) -> None:
    save(tmp_path, **SHARING)
    (tmp_path / "model.safetensors").unlink()
    options = {"dtype": "float32", "max_model_len": 100, "max_num_seqs": 1, "load_format": "dummy"}
    with LLM(tmp_path, device="cpu", **options) as llm:
        (answer,) = llm.generate([list(range(1, 40))], SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert len(answer.token_ids) == 3


def test_the_module_for_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"module \(mtp_dspark\) is not computed: leave --speculative-method mtp out"):
        find_family("mistral_large4_text").check_mtp(tiny_config("mistral_large4_text"))
