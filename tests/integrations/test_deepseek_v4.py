"""Names and configs of DeepSeek-V4 and V4.1; test_variants.py and test_rounded_caches.py have whole models."""

import json
from pathlib import Path
from typing import Any

import pytest

from dcpmla import LLM
from dcpmla.attention.layers.compressed.config import WINDOW_ONLY, LayerKind
from dcpmla.config import DCPConfig
from dcpmla.integrations.families.deepseek_v4 import DEEPSEEK_V4
from dcpmla.integrations.families.table import attention_of, family_of
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.open_model import check_layout, open_model
from dcpmla.runtime.sampling import SamplingParams
from tests.support.deepseek_v41_files import TEXT
from tests.support.layouts import dcp_config
from tests.support.models import random_model, save_tiny, tiny_config


def test_names_of_modules_stay() -> None:
    names = random_model(tiny_config("deepseek_v4")).state_dict()
    assert [DEEPSEEK_V4.module_name(name, 43) for name in names] == list(names)


def test_names_of_the_mtp_module() -> None:
    """Those of scales; test_mtp.py has a module's other tensors."""
    published = {
        "attn.wq_a.scale": "self_attn.q_a_proj.weight_scale_inv",
        "ffn.experts.3.w2.scale": "mlp.experts.3.down_proj.weight_scale_inv",
    }
    for name, called in published.items():
        assert DEEPSEEK_V4.module_name(f"mtp.0.{name}", 43) == f"model.layers.43.{called}"


@pytest.mark.usefixtures("one_process_on_cpu")
def test_a_short_model_of_a_large_ratio(tmp_path: Path) -> None:
    """Memory for contexts is counted in tokens, of which a block of 64 rows covers 1,024."""
    layers = {"layer_types": ["sliding_attention", "heavily_compressed_attention"], "mlp_layer_types": ["moe", "moe"]}
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
    save_tiny("deepseek_v4", tmp_path, num_hidden_layers=2, **layers, compress_rates=rates)
    with LLM(tmp_path, device="cpu", dtype="float32", max_model_len=100, max_num_seqs=1, block_size=64) as llm:
        (answer,) = llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert len(answer.token_ids) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 3}, "block_size .*is 3; 4 times as many tokens must be whole entries"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size .*is 5; it must divide the 24 groups"),
    ],
)
def test_options_that_it_does_not_have(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("deepseek_v4").to_dict()))
    with pytest.raises(ValueError, match=message):
        check_layout(open_model(str(tmp_path)), DCPConfig(**options))


def read(directory: Path, **changes: Any) -> Any:
    fields = {name: value for name, value in (TEXT | changes).items() if value is not ...}
    whole = {"model_type": "deepseek_v41", "image_token_id": 129264, "text_config": fields}
    (directory / "config.json").write_text(json.dumps(whole))
    return load_config(directory)


def test_kinds_of_layers(tmp_path: Path) -> None:
    config = attention_of(read(tmp_path)).config
    assert config.layer_kinds == (
        WINDOW_ONLY,
        LayerKind(2, True),
        LayerKind(2, False, writes=False, reuses=True),
        LayerKind(1, True, candidates="source"),
        LayerKind(1, False, writes=False, reuses=True),
        LayerKind(1, True, writes=False, candidates="within"),
        LayerKind(1, False, writes=False, reuses=True),
    )
    assert config.row_groups == {0: (0,), 1: (1, 2), 3: (3, 4, 5, 6)}
    assert config.rings == (0, 0, 1, 0, 1, 2, 3)
    assert config.candidates == (5, 2)
    without = attention_of(read(tmp_path, candidate_source_layer_id=-1, candidate_topk_blocks=...)).config
    assert without.candidates is None
    assert not any(kind.candidates for kind in without.layer_kinds)


def test_candidate_blocks_are_whole_on_a_rank(tmp_path: Path) -> None:
    """The interleave of entries is whole candidate blocks, whatever is asked for."""
    config = attention_of(read(tmp_path)).config
    for interleave, expected in ((1, 2), (3, 6), (4, 4)):
        layout = config.with_whole_blocks(dcp_config(2, 2, interleave, block_size=12))
        assert layout.cp_kv_cache_interleave_size == expected
    read(tmp_path, candidate_block_size=4)
    message = r"block_size \(--block-size\) is 6; it must be a multiple of 4, of candidate blocks of 4 entries"
    with pytest.raises(ValueError, match=message):
        check_layout(open_model(str(tmp_path)), DCPConfig(block_size=6))


def test_drafts_are_refused(tmp_path: Path) -> None:
    config = read(tmp_path)
    with pytest.raises(ValueError, match="'mtp'; the drafts of deepseek_v41_text come from a DSpark module"):
        family_of(config).check_mtp(config)
