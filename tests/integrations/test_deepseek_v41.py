"""DeepSeek-V4.1's checkpoints as published, against float64: layouts, prefixes, drafts, graphs, caches of 8 bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dcpmla import LLM
from dcpmla.config import DCPConfig
from dcpmla.runtime.sampling import SamplingParams
from tests.integrations.test_deepseek_v4 import rounded
from tests.integrations.test_drafts import PROMPTS, serve_families
from tests.integrations.test_transformers import Case, check, make_cases, prompts
from tests.runtime.test_graph_caches import compare
from tests.support import deepseek_v41
from tests.support.deepseek_v41_files import save_v41
from tests.support.layouts import dcp_config
from tests.support.oracle import Oracle
from tests.support.ranks import run_ranks
from tests.support.whole_models import serve_layouts


def test_logits_and_tokens(tmp_path: Path) -> None:
    check(save_v41(tmp_path), tmp_path, 2, make_cases(2, [2, 1], (1, 8), ("auto",), is_compressed=True))


def test_memories_over_four_ranks(tmp_path: Path) -> None:
    reference = save_v41(tmp_path, engram_layer_ids=[1, 4])
    check(reference, tmp_path, 4, make_cases(4, [4, 2], (4,), ("auto",), is_compressed=True))


def test_published_formats(tmp_path: Path) -> None:
    """With memories of n-grams."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "q_lora_rank": 128}
    reference = save_v41(tmp_path, is_quantized=True, engram_layer_ids=[1, 4], **sizes)
    check(reference, tmp_path, 2, make_cases(2, [2], (1,), ("auto",), is_compressed=True))


def test_indexers_without_candidate_blocks(tmp_path: Path) -> None:
    """Only layers of one ratio, and a layer with windows alone between readers."""
    changes = {"compress_ratios": [2, 2, 0, 2, 0, 2, 2], "kv_source_layer_ids": [0, 5]}
    changes |= {"index_source_layer_ids": [0, 3, 5], "candidate_source_layer_id": -1}
    check(save_v41(tmp_path, **changes), tmp_path, 2, make_cases(2, [2], (1,), ("auto",), is_compressed=True))


def test_prompts_over_a_small_workspace(tmp_path: Path) -> None:
    """Entries come in many chunks, or queries go to them: two heads are fewer rows than the longest context."""
    reference = save_v41(tmp_path, num_attention_heads=2, o_groups=2)
    dcp = dcp_config(2, 2, block_size=4, context_workspace_tokens=8, dcp_comm_backend="a2a", check_exchange=True)
    check(reference, tmp_path, 2, [Case(dcp, 4), Case(replace(dcp, cp_kv_cache_interleave_size=2), 33)])


WIDE = {"head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 64}  # fp8_ds_mla takes these sizes


def test_caches_of_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference rounds rows after RoPE. Every entry is selected, for rounded index keys may change
    the choice.
    """
    reference = save_v41(tmp_path, **WIDE, index_topk=128, candidate_topk_blocks=128)
    fp8 = dcp_config(2, 2, 2, block_size=8, kv_cache_dtype="fp8_ds_mla", index_cache_dtype="fp8")
    results = run_ranks(2, serve_layouts, tmp_path, [fp8, replace(fp8, decode_context_parallel_size=1)], prompts())[0]
    rotate = deepseek_v41._rotate

    def rotate_and_round(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        is_row = x.shape[1:] == (WIDE["head_dim"],)
        return rounded(rotate(x, angles).float()).double() if is_row else rotate(x, angles)

    monkeypatch.setattr(deepseek_v41, "_rotate", rotate_and_round)
    assert max(Oracle(reference).errors(prompts(), results)) < 1e-2  # few codes are others


def test_drafts_change_no_token(tmp_path: Path) -> None:
    """With memories of n-grams."""
    reference = save_v41(tmp_path, engram_layer_ids=[1, 4])
    results = run_ranks(2, serve_families, [tmp_path], 2, 2, 2)[0]
    assert max(Oracle(reference).errors(PROMPTS, results)) < 1e-4


def test_replayed_graphs(tmp_path: Path) -> None:
    save_v41(tmp_path)
    run_ranks(1, compare, tmp_path, DCPConfig(block_size=8, index_cache_dtype="fp8"))


@pytest.mark.usefixtures("one_process_on_cpu")
def test_a_whole_engine(tmp_path: Path) -> None:
    """With the default interleave, and without weights."""
    save_v41(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 100, "max_num_seqs": 2, "load_format": "dummy"}
    with LLM(tmp_path, **options) as llm:
        answers = llm.generate(prompts(), SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert [len(answer.token_ids) for answer in answers] == [3] * len(prompts())
