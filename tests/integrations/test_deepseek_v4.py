"""DeepSeek-V4's checkpoints as they are published, and whole models over caches of 8 bits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from dcpmla import LLM
from dcpmla.cache.shared_format import rows_shape
from dcpmla.cache.shared_rows import read_rows, write_rows
from dcpmla.config import DCPConfig
from dcpmla.integrations.families.deepseek_v4 import DEEPSEEK_V4
from dcpmla.integrations.open_model import check_layout, open_model
from dcpmla.runtime.sampling import SamplingParams
from tests.integrations.test_transformers import Case, check, make_cases, prompts
from tests.support.layouts import dcp_config
from tests.support.models import random_model, save_tiny, tiny_config
from tests.support.oracle import Oracle
from tests.support.quantized_models import published_name
from tests.support.ranks import run_ranks
from tests.support.whole_models import serve_layouts


def publish(directory: Path) -> dict[str, Any]:
    """Rename a saved checkpoint's tensors as DeepSeek does, and return them."""
    saved = load_file(directory / "model.safetensors")
    tensors = {published_name(name): tensor for name, tensor in saved.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tensors


def test_names_of_modules_stay() -> None:
    names = random_model(tiny_config("deepseek_v4")).state_dict()
    assert [DEEPSEEK_V4.module_name(name, 43) for name in names] == list(names)


def test_names_of_the_mtp_module() -> None:
    published = {
        "attn.wq_a.scale": "self_attn.q_a_proj.weight_scale_inv",
        "attn_norm.weight": "input_layernorm.weight",
        "e_proj.weight": "e_proj.weight",
        "ffn.experts.3.w2.scale": "mlp.experts.3.down_proj.weight_scale_inv",
        "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
        "hc_attn_fn": "attn_hc.fn",
        "hc_head_scale": "hc_head_scale",
        "hnorm.weight": "hnorm.weight",
        "norm.weight": "shared_head.norm.weight",
    }
    for name, called in published.items():
        assert DEEPSEEK_V4.module_name(f"mtp.0.{name}", 43) == f"model.layers.43.{called}"


def test_published_names(tmp_path: Path) -> None:
    reference = save_tiny("deepseek_v4", tmp_path)
    names = publish(tmp_path)
    assert {"layers.1.attn.indexer.compressor.ape", "layers.0.ffn.gate.tid2eid", "hc_head_fn"} <= set(names)
    check(reference, tmp_path, 2, make_cases(2, [2], (1,), ("a2a",), is_compressed=True))


def test_layers_that_compress_alike(tmp_path: Path) -> None:
    """Layers with an indexer and layers without may have one ratio."""
    config = tiny_config("deepseek_v4")
    config.compress_rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4}
    reference = random_model(config)
    reference.save_pretrained(tmp_path)
    check(reference, tmp_path, 1, make_cases(1, [1], (1,), ("ag_rs",), is_compressed=True))


def test_prompts_over_a_small_workspace(tmp_path: Path) -> None:
    """Entries come in many chunks, or queries go to them: two heads are fewer rows than the longest context."""
    config = tiny_config("deepseek_v4")
    config.num_attention_heads = config.o_groups = 2
    reference = random_model(config)
    reference.save_pretrained(tmp_path)
    dcp = DCPConfig(tensor_parallel_size=2, block_size=4, context_workspace_tokens=4, dcp_comm_backend="a2a")
    sharded = {"decode_context_parallel_size": 2, "context_workspace_tokens": 8, "check_exchange": True}
    cases = [
        Case(dcp, 33),
        Case(replace(dcp, **sharded), 4),
        Case(replace(dcp, **sharded, cp_kv_cache_interleave_size=2), 33),
    ]
    check(reference, tmp_path, 2, cases)


@pytest.mark.usefixtures("one_process_on_cpu")
def test_a_short_model_of_a_large_ratio(tmp_path: Path) -> None:
    """Memory for contexts is counted in tokens, of which a block of 64 rows covers 1,024."""
    config = tiny_config("deepseek_v4")
    config.layer_types = ["sliding_attention", "heavily_compressed_attention"]
    config.num_hidden_layers, config.mlp_layer_types = 2, ["moe", "moe"]
    config.compress_rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
    random_model(config).save_pretrained(tmp_path)
    with LLM(tmp_path, device="cpu", dtype="float32", max_model_len=100, max_num_seqs=1, block_size=64) as llm:
        (answer,) = llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert len(answer.token_ids) == 3


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Round rows [.., D] as a cache of fp8_ds_mla does."""
    flat = rows.flatten(0, -2)
    cache = torch.zeros(rows_shape(len(flat), rows.shape[-1], torch.uint8), dtype=torch.uint8)
    write_rows(cache, flat, torch.arange(len(flat)))
    return read_rows(cache, torch.arange(len(flat)), rows.shape[-1], rows.dtype).view(rows.shape)


def test_caches_of_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cut of the caches reads the rows that transformers' model reads where they are rounded after RoPE. Every
    entry is selected, for rounded index keys may tip the choice among some of them.
    """
    config = tiny_config("deepseek_v4")
    config.head_dim, config.index_head_dim, config.index_topk = 128, 64, 64
    config.qk_rope_head_dim, config.partial_rotary_factor = 64, 0.5
    for rope in config.rope_parameters.values():
        rope["partial_rotary_factor"] = 0.5
    reference = random_model(config)
    reference.save_pretrained(tmp_path)
    dcp = dcp_config(2, 2, block_size=4, dcp_comm_backend="a2a", kv_cache_dtype="fp8_ds_mla", index_cache_dtype="fp8")
    results = run_ranks(2, serve_layouts, tmp_path, [dcp, replace(dcp, decode_context_parallel_size=1)], prompts())[0]
    rotate = modeling_deepseek_v4.apply_rotary_pos_emb

    def rotate_and_round(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        is_row = x.shape[1] == 1 and x.shape[-1] == config.head_dim and x.shape[2] != config.num_attention_heads
        return rounded(rotate(x, cos, sin)) if is_row else rotate(x, cos, sin)

    monkeypatch.setattr(modeling_deepseek_v4, "apply_rotary_pos_emb", rotate_and_round)
    assert max(Oracle(reference).errors(prompts(), results)) < 1e-2  # few codes are others


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 3}, "block_size .*is 3; 4 times as many tokens must be whole entries"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype .*fp8 does not go with DeepSeek-V4's attention"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size .*is 5; it must divide the 24 groups"),
    ],
)
def test_options_that_it_does_not_have(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("deepseek_v4").to_dict()))
    with pytest.raises(ValueError, match=message):
        check_layout(open_model(str(tmp_path)), DCPConfig(**options))
