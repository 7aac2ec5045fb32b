"""Indexers in the configs of sparse models, against the modules of transformers."""

import re
from typing import Any

import pytest
import torch
import transformers

from dcpmla import DCPConfig
from dcpmla.integrations.families.table import attention_of
from tests.support.models import SPARSE_FAMILIES, tiny_config
from tests.test_config import make_config, make_module


def selecting_layers(config: Any) -> tuple[int, ...]:
    return tuple(number for number, layer in enumerate(attention_of(config).layers) if layer.has_indexer)


@pytest.mark.parametrize("family", SPARSE_FAMILIES)
def test_indexer_is_that_of_the_module(family: str) -> None:
    hf_config = make_config(family)
    indexer, found = make_module(hf_config).indexer, attention_of(hf_config).config.indexer
    sizes = indexer.weights_proj.out_features, indexer.wk.out_features, indexer.index_topk
    assert found is not None
    assert (found.num_heads, found.head_dim, found.topk) == sizes
    with torch.device("meta"):
        model = getattr(transformers, type(hf_config).__name__.replace("Config", "ForCausalLM"))(hf_config)
    has_indexer = [layer.self_attn.indexer is not None for layer in model.model.layers]
    assert selecting_layers(hf_config) == tuple(layer for layer, has in enumerate(has_indexer) if has)
    assert (attention_of(hf_config).num_index_layers, all(has_indexer)) == (2, family != "glm_moe_dsa")


@pytest.mark.parametrize("family", SPARSE_FAMILIES)
@pytest.mark.parametrize(
    ("fields", "types"),
    [
        ({}, "FFFFFF"),
        ({"index_topk_freq": 1}, "FFFFFF"),
        ({"index_topk_freq": 2}, "FFSFSF"),
        ({"index_topk_freq": 4}, "FFSSSF"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFSFS"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 4}, "FFFFSS"),
        ({"index_topk_freq": 2, "index_topk_pattern": "FSSFFS"}, "FSSFFS"),
        ({"index_topk_pattern": ["full", "shared", "full", "full", "shared", "full"]}, "FSFFSF"),
        ({"index_topk_pattern": "FSSFFS", "indexer_types": ["full"] * 6}, "FFFFFF"),
    ],
    ids=str,
)
def test_which_layers_select(family: str, fields: dict[str, Any], types: str) -> None:
    """DeepSeek-V3.2's as transformers' GLM-5 reads the same fields."""
    glm, own = transformers.GlmMoeDsaConfig, type(tiny_config(family))
    expected = glm(num_hidden_layers=6, **fields).indexer_types
    assert expected == [{"F": "full", "S": "shared"}[letter] for letter in types]
    config = own(num_hidden_layers=6, **fields)
    assert selecting_layers(config) == tuple(layer for layer, letter in enumerate(types) if letter == "F")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"index_topk_pattern": "FSX"},
            "the config's index_topk_pattern give ['full', 'shared', 'X']; each of 3 layers",
        ),
        (
            {"index_topk_pattern": "SFF"},
            "the config's index_topk_pattern give ['shared', 'full', 'full']; each of 3 layers",
        ),
        ({"index_topk_pattern": "FS"}, "the config's index_topk_pattern give ['full', 'shared']; each of 3 layers"),
        *(
            ({"indexer_types": types}, f"the config's indexer_types give {types}; each of 3 layers has one, full or ")
            for types in (["full", "half", "full"], ["shared", "full", "full"], ["full", "shared"])
        ),
    ],
)
def test_layers_that_neither_select_nor_share(fields: dict[str, Any], message: str) -> None:
    config = transformers.DeepseekV32Config(num_hidden_layers=3, **fields)
    with pytest.raises(ValueError, match="^model: " + re.escape(message)) as error:
        attention_of(config)
    assert str(error.value).endswith("; each of 3 layers has one, full or shared, and the first is full")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"index_cache_dtype": "fp8"}, "index_cache_dtype (--index-cache-dtype) fp8"),
        ({"index_hadamard": True}, "index_hadamard (--index-hadamard)"),
    ],
)
def test_a_dense_model_has_no_index_cache(options: dict[str, Any], name: str) -> None:
    dense, sparse = (attention_of(make_config(family)) for family in ("deepseek_v3", "deepseek_v32"))
    assert (dense.config.indexer, dense.num_index_layers) == (None, 0)
    message = f"{name} goes with sparse MLA, whose layers have indexers; this attention is dense"
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        dense.check_layout(DCPConfig(**options))
    dense.check_layout(DCPConfig())
    sparse.check_layout(DCPConfig(**options))
