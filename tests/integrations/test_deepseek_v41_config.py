"""Configs of DeepSeek-V4.1: every field is used, has no effect on text, or is refused by its name."""

import json
from pathlib import Path
from typing import Any

import pytest

from dcpmla.attention.layers.compressed.config import WINDOW_ONLY, LayerKind
from dcpmla.config import DCPConfig
from dcpmla.integrations.families.table import attention_of, family_of
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.open_model import check_layout, open_model
from tests.support.deepseek_v41_files import TEXT
from tests.support.layouts import dcp_config


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
