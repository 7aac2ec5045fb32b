"""Caches of 8 bits in whole models: near transformers' logits, and as near with DCP as without, over prefixes, too."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from tests.integrations.test_transformers import prompts
from tests.support import deepseek_v41
from tests.support.layouts import dcp_config
from tests.support.models import FAMILIES, LARGE4_SHARING, save_tiny, tiny_config
from tests.support.oracle import Oracle
from tests.support.ranks import run_ranks
from tests.support.rounded_rows import rounding
from tests.support.whole_models import serve_layouts

FP8 = {"kv_cache_dtype": "fp8", "index_cache_dtype": "fp8", "index_hadamard": True}
ROWS = {"kv_cache_dtype": "fp8_ds_mla", "index_cache_dtype": "fp8"}


class Case(NamedTuple):
    """A model's fields, formats of its caches, and the largest errors of an answer: e4m3 keeps three bits.

    Attributes:
        bound, apart: Largest error beside exact caches, and of DCP 2 beside DCP 1.
    """

    fields: dict[str, Any]
    formats: list[dict[str, Any]]
    bound: float
    apart: float = 1e-2


WINDOW = {"head_dim": 20, "kv_lora_rank": 256, "num_attention_heads": 24, "num_key_value_heads": 24, "q_lora_rank": 20}
WINDOW |= {"qk_nope_head_dim": 12, "v_head_dim": 6}
WIDE = {
    **{"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128, "qk_head_dim": 128, "index_head_dim": 128, "initializer_range": 0.05},
}
CASES = {
    "axk2": Case({"kv_lora_rank": 128, "topk_group": 2}, [FP8 | {"kv_cache_scale": 0.02}, ROWS], 0.2),
    "hy_v4": Case({"kv_lora_rank": 128}, [ROWS | {"index_hadamard": True}, FP8 | {"kv_cache_scale": 0.02}], 0.2),
    "glm5_next_text": Case({}, [FP8 | {"kv_cache_scale": 0.1}], 0.1, 0.02),
    "mistral_large4_text": Case(
        WIDE | LARGE4_SHARING,
        [scaled := FP8 | {"calculate_kv_scales": True}, scaled | {"decode_query_dtype": "fp8"}, ROWS],
        0.06,
    ),
    "dots3_note_text": Case(
        {"kv_lora_rank": 128, "per_layer_config": {layer: WINDOW for layer in (1, 2)}}, [FP8, ROWS], 0.2
    ),
}


@pytest.mark.parametrize("family", [family for family in CASES if family in FAMILIES])
def test_caches_of_8_bits(family: str, tmp_path: Path) -> None:
    """Every token and every expert is selected, because rounding may change a choice."""
    fields, formats, bound, apart = CASES[family]
    reference = save_tiny(family, tmp_path, **fields, index_topk=128, num_experts_per_tok=4)
    plain = dcp_config(2, 2, 1 if family == "glm5_next_text" else 2, block_size=16, dcp_comm_backend="a2a")
    layouts = [plain, *(replace(plain, **each) for each in formats)]
    layouts.append(replace(layouts[-1], decode_context_parallel_size=1))
    exact, *rounded = run_ranks(2, serve_layouts, tmp_path, layouts, prompts(), 2, timeout=300)[0]
    oracle = Oracle(reference)
    assert max(oracle.errors(prompts(), [exact])) < 1e-4
    assert max(oracle.errors(prompts(), rounded)) < bound
    for (_, logits), (_, whole) in zip(*rounded[-2:], strict=True):
        assert float((logits - whole).norm() / whole.norm()) < apart


@pytest.mark.parametrize("family", ["deepseek_v4", "deepseek_v41"])
def test_the_rows_that_a_model_rounds(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference rounds rows after RoPE. Every entry is selected, for rounded index keys may tip the choice."""
    fields: dict[str, Any] = {"head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 64, "index_topk": 128}
    if family == "deepseek_v4":
        ropes = tiny_config(family).rope_parameters.items()
        fields |= {"rope_parameters": {name: rope | {"partial_rotary_factor": 0.5} for name, rope in ropes}}
        fields |= {"partial_rotary_factor": 0.5}
        module, name = modeling_deepseek_v4, "apply_rotary_pos_emb"
    else:
        fields |= {"candidate_topk_blocks": 128}
        module, name = deepseek_v41, "rotate"
    reference = save_tiny(family, tmp_path, **fields)
    fp8 = dcp_config(2, 2, 2, block_size=8, dcp_comm_backend="a2a", **ROWS)
    results = run_ranks(2, serve_layouts, tmp_path, [fp8, replace(fp8, decode_context_parallel_size=1)], prompts())[0]
    # Queries have 24 heads.
    rounded = rounding(getattr(module, name), lambda x: x.shape[-1] == 128 and 24 not in x.shape[1:3])
    monkeypatch.setattr(module, name, rounded)
    assert max(Oracle(reference).errors(prompts(), results)) < 1e-2  # few codes are others
