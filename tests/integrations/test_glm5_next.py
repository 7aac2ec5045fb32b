"""GLM-5-Next: published names, other sizes of pools, caches of 8 bits and prefixes, block fp8, fields of its config.

test_transformers.py has more layouts, test_drafts.py and test_graph_models.py drafts and graphs.
"""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dcpmla.config import DCPConfig
from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from tests.integrations.test_quantized_families import check as check_quantized
from tests.integrations.test_quantized_families import outcome
from tests.integrations.test_transformers import check, make_cases, prompts
from tests.planning.test_plan_truth import check as check_bytes
from tests.support.layouts import dcp_config
from tests.support.models import STATE_FAMILIES, random_model, tiny_config
from tests.support.oracle import Oracle
from tests.support.quantized_models import write_dequantized, write_quantized
from tests.support.ranks import run_ranks
from tests.support.whole_models import serve_layouts

pytestmark = pytest.mark.skipif("glm5_next_text" not in STATE_FAMILIES, reason="needs a transformers with GLM-5-Next")
PUBLISHED = Path(__file__).parents[1] / "planning" / "configs" / "glm5_next.json"
WIDE = {
    **{"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128},
    **{"qk_head_dim": 128, "v_head_dim": 128, "index_head_dim": 128, "linear_num_heads": 4, "linear_head_dim": 64},
    "initializer_range": 0.1,
}


def save(directory: Path, **changes: Any) -> Any:
    config = tiny_config("glm5_next_text")
    for name, value in changes.items():
        setattr(config, name, value)
    model = random_model(config)
    model.save_pretrained(directory)
    return model


def test_published_names_beside_an_mtp_module(tmp_path: Path) -> None:
    """On four ranks. transformers saves the names that it reads."""
    reference, file = save(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert {
        "model.language_model.layers.0.hc_attn_fn",
        "model.language_model.layers.0.self_attn.A_log",
        "model.language_model.layers.0.self_attn.f_b_proj.weight",
        "model.language_model.layers.0.self_attn.q_conv1d.weight",
        "model.language_model.layers.1.hc_ffn_scale",
        "model.language_model.layers.1.mlp.experts.3.up_proj.weight",
        "model.language_model.layers.1.self_attn.indexer.index_kpool_compress_gate",
    } <= set(tensors)
    save_file(tensors | {"model.language_model.layers.5.eh_proj.weight": torch.ones(48, 96)}, file)
    check(reference, tmp_path, 4, make_cases(4, [4], (2,), ("a2a",)))


def test_other_sizes(tmp_path: Path) -> None:
    """A pool as long as a block, four streams, decays without a bound, a width that is no power of two."""
    changes = {"index_kpool": 8, "hc_mult": 4, "linear_lower_bound": None, "index_head_dim": 24}
    reference = save(tmp_path, **changes)
    check(reference, tmp_path, 2, make_cases(2, [2, 1], (1, 2), ("auto",)))


def test_caches_of_8_bits_and_prefixes(tmp_path: Path) -> None:
    """Every token is selected, for rounded index keys may tip the choice among pools."""
    reference = save(tmp_path, index_topk=128)
    plain = dcp_config(2, 2, block_size=16, dcp_comm_backend="a2a")
    fp8 = replace(plain, kv_cache_dtype="fp8", kv_cache_scale=0.1, index_cache_dtype="fp8", index_hadamard=True)
    one = replace(fp8, decode_context_parallel_size=1)
    exact, *rounded = run_ranks(2, serve_layouts, tmp_path, [plain, fp8, one], prompts(), 2)[0]
    assert max(Oracle(reference).errors(prompts(), [exact])) < 1e-4
    assert max(Oracle(reference).errors(prompts(), rounded)) < 0.1


@pytest.mark.parametrize(("scheme", "is_spread"), [("block", True), ("compressed_block", False)])
def test_weights_in_block_fp8(scheme: str, is_spread: bool, tmp_path: Path) -> None:
    """Of linear attention, too. Experts are cut, or spread whole over the ranks."""
    model_class = type(save(tmp_path / "wide", **WIDE))
    write_quantized(tmp_path / "wide", tmp_path / "stored", scheme)
    write_dequantized(tmp_path / "wide", tmp_path / "twin", scheme)
    results = run_ranks(2, outcome, tmp_path / "stored", 2, is_spread)
    check_quantized(results, model_class.from_pretrained(tmp_path / "twin", dtype=torch.float32).eval())
    for _, kinds, num_quantized, num_linears in results:
        assert kinds == {"BlockFp8"}
        assert num_quantized / num_linears > 0.5


@pytest.mark.skipif(
    not hasattr(transformers, "HYV4VLTextConfig"), reason="before 5.24 files have fewer float32 weights"
)
def test_bytes(tmp_path: Path) -> None:
    config = tiny_config("glm5_next_text")
    random_model(config).save_pretrained(tmp_path)
    config.dtype = torch.bfloat16
    random_model(config).bfloat16().save_pretrained(tmp_path / "narrow")
    check_bytes([tmp_path, tmp_path / "narrow"], 2)
    kind = attention_of(load_config(tmp_path))
    plan = kind.plan_cache(DCPConfig(block_size=16), [64], torch.float32, num_states=3, num_drafts=2)
    assert plan.bytes_per_block == 16 * 3 * (16 + 64) * 4 + 4 * 2 * 16 * 4  # three layers of MLA, two with an indexer
    tensors = plan.allocate(torch.device("cpu")).tensors
    assert sum(tensor.nbytes for tensor in tensors) == plan.bytes_per_rank


def test_published_sizes() -> None:
    """The sizes are defaults of transformers' config."""
    size = read_model(load_config(PUBLISHED))
    kind = size.attention
    assert [number for number, layer in enumerate(kind.layers) if layer.has_indexer] == [*range(3, 45, 4)]
    assert round(sum(p.count * prod(p.shape) for p in size.parameters) / 1e9) == 313
    plan = kind.plan_cache(DCPConfig(tensor_parallel_size=8, decode_context_parallel_size=8), [4096], torch.bfloat16)
    assert plan.bytes_per_token == 11 * (576 * 2 + 256 // 16)
    reads = {(layer.reads(32768).num_rows, layer.reads(32768).num_keys): n for layer, n in kind.sorts.items()}
    assert reads == {(2063, 2048): 11, (0, 0): 34}


def test_blocks_hold_whole_pools() -> None:
    kind = attention_of(load_config(PUBLISHED))
    with pytest.raises(ValueError, match=r"block_size \(--block-size\) is 64; it must be a multiple of 128"):
        kind.check_layout(DCPConfig(cp_kv_cache_interleave_size=8, block_size=64))
