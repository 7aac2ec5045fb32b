"""Sizes and patterns of layers that a family's config may have and the tiny models of all families have not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpmla.config import DCPConfig
from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.model_files import load_config
from tests.integrations.test_transformers import Case, check, make_cases
from tests.support.models import FAMILIES, LARGE4_SHARING, save_tiny

K3 = json.loads((Path(__file__).parents[1] / "planning" / "configs" / "kimi_k3.json").read_text())["text_config"]
NO_GROUPS = {"n_group": None, "topk_group": None, "num_hidden_layers": 3, "layer_types": ["indexed_attention"] * 3}
# By name: a family, fields of its config, TP and other DCP sizes, interleaves.
VARIANTS: dict[str, tuple[str, dict[str, Any], list[int], tuple[int, ...]]] = {
    "experts without groups, MLPs in turn": (
        "axk2",
        NO_GROUPS | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
        [2],
        (1, 2),
    ),
    "layers with an indexer and without of one ratio": (
        "deepseek_v4",
        {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4}},
        [1],
        (1,),
    ),
    "a pool as long as a block, four streams, decays without a bound, a width that is no power of two": (
        "glm5_next_text",
        {"index_kpool": 8, "hc_mult": 4, "linear_lower_bound": None, "index_head_dim": 24},
        [2, 1],
        (1, 2),
    ),
    "a group for each layer": ("kimi_k3", {"attn_res_block_size": 1, "activation_situ_beta": 2.0}, [1], (1,)),
    "a group of all layers": ("kimi_k3", {"attn_res_block_size": 5}, [1], (1,)),
    "experts in MXFP4, whole groups of 32 on each rank": (
        "kimi_k3",
        {"moe_intermediate_size": 64, "quantization_config": K3["quantization_config"]},
        [2],
        (1,),
    ),
    "shared latents": ("mistral_large4_text", LARGE4_SHARING, [2], (1, 2)),
    "memories of n-grams over four ranks": ("deepseek_v41", {"engram_layer_ids": [1, 4]}, [4, 2], (4,)),
    "published formats": (
        "deepseek_v41",
        {"is_quantized": True, "engram_layer_ids": [1, 4]}
        | {"hidden_size": 128, "moe_intermediate_size": 128, "q_lora_rank": 128},
        [2],
        (1,),
    ),
    "no candidate blocks, layers of one ratio and of windows between readers": (
        "deepseek_v41",
        {"compress_ratios": [2, 2, 0, 2, 0, 2, 2], "kv_source_layer_ids": [0, 5]}
        | {"index_source_layer_ids": [0, 3, 5], "candidate_source_layer_id": -1},
        [2],
        (1,),
    ),
}
KNOWN = (*FAMILIES, "deepseek_v41")


@pytest.mark.parametrize("name", [name for name, (family, *_) in VARIANTS.items() if family in KNOWN])
def test_logits_and_tokens(name: str, tmp_path: Path) -> None:
    family, fields, sizes, interleaves = VARIANTS[name]
    reference = save_tiny(family, tmp_path, **fields)
    is_compressed = "deepseek_v4" in family
    check(reference, tmp_path, sizes[0], make_cases(sizes[0], sizes, interleaves, ("auto",), is_compressed))


@pytest.mark.parametrize("family", ["deepseek_v4", "deepseek_v41"])
def test_prompts_over_a_small_workspace(family: str, tmp_path: Path) -> None:
    """Entries come in many chunks, or queries go to them: two heads are fewer rows than the longest context."""
    reference = save_tiny(family, tmp_path, num_attention_heads=2, o_groups=2)
    plain = DCPConfig(tensor_parallel_size=2, block_size=4, context_workspace_tokens=4, dcp_comm_backend="a2a")
    sharded = replace(plain, decode_context_parallel_size=2, context_workspace_tokens=8, check_exchange=True)
    cases = [Case(plain, 33), Case(sharded, 4), Case(replace(sharded, cp_kv_cache_interleave_size=2), 33)]
    check(reference, tmp_path, 2, cases)


@pytest.mark.skipif("mistral_large4_text" not in FAMILIES, reason="needs a transformers with Mistral Large 4")
def test_shared_latents_are_cached_once(tmp_path: Path) -> None:
    save_tiny("mistral_large4_text", tmp_path, **LARGE4_SHARING)
    plan = attention_of(load_config(tmp_path)).plan_cache(DCPConfig(), [64], torch.float32)
    assert plan.bytes_per_token == 3 * 24 * 4 + 4 * 16 * 4  # latents of layers 0, 1 and 4; four layers' index keys
