"""The configuration read from Hugging Face against what transformers' attention modules compute, indexers of sparse
models included; mistakes against their messages.
"""

import importlib
import math
import re
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale

from dcpmla.config import DCPConfig, MLAConfig
from dcpmla.integrations.families.family import yarn_mscale
from dcpmla.integrations.families.table import FAMILIES, attention_of
from tests.support.models import LARGE4_FAMILIES, MLA_FAMILIES, SPARSE_FAMILIES, tiny_config

POSITIONS = torch.tensor([0, 15, 16, 40, 100])
ROPES = ("default", "yarn", "yarn without mscale_all_dim")
# Mistral Large 4's layers differ from each other: its whole model is compared.
families = pytest.mark.parametrize("family", [family for family in MLA_FAMILIES if family not in LARGE4_FAMILIES])
ropes = pytest.mark.parametrize("rope", ROPES)


def make_config(family: str, rope: str = "yarn") -> Any:
    config = tiny_config(family)
    config.rms_norm_eps = 1e-3  # not that of the latents' norms
    if rope == "yarn without mscale_all_dim":
        config.rope_parameters = {
            key: value for key, value in config.rope_parameters.items() if key != "mscale_all_dim"
        }
    if rope == "default":
        config.rope_parameters["rope_type"] = "default"
    config._attn_implementation = "eager"
    return config


def modeling(config: Any) -> Any:
    return importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")


def make_module(config: Any) -> Any:
    """Make the family's attention module, its norms drawn at random."""
    torch.manual_seed(0)
    name = type(config).__name__.removesuffix("Config") + (
        "MLA" if config.model_type == "longcat_flash" else "Attention"
    )
    module = getattr(modeling(config), name)(config, layer_idx=0)
    for parameter in (parameter for key, parameter in module.named_parameters() if "norm" in key):
        parameter.data.uniform_(0.5, 1.5)
    return module


def call(module: Any, hidden: Tensor, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a module on POSITIONS; return the query and the scaling that reach its attention function."""
    library, seen = modeling(module.config), {}

    def attention(
        _: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **__: Any
    ) -> tuple[Tensor, None]:
        seen.update(query=query[0].transpose(0, 1), scaling=scaling)
        return value.transpose(1, 2), None

    monkeypatch.setattr(library, "eager_attention_forward", attention)
    width = module.config.qk_rope_head_dim
    one = torch.ones(1, len(POSITIONS), width)
    angles = (
        torch.ones(1, len(POSITIONS), width // 2) + 0j if module.config.model_type == "deepseek_v2" else (one, 0 * one)
    )
    mask = torch.zeros(1, 1, len(POSITIONS), len(POSITIONS)) if hasattr(module.config, "index_topk") else None
    module(hidden[None], position_embeddings=angles, attention_mask=mask, position_ids=POSITIONS[None])
    return seen


def query_projection(module: Any, config: MLAConfig) -> Any:
    if config.q_lora_rank is None:
        return module.q_proj
    return module.q_gate_proj if config.query_gates else module.q_b_proj


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@families
@ropes
def test_scale_is_that_of_the_scores(family: str, rope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a module multiplies into its query and its scores, together it is scale x the Llama 4 factor."""
    hf_config = make_config(family, rope)
    module, config = make_module(hf_config), attention_of(hf_config).config
    scale = module.scaling * getattr(module, "mla_scale_q_lora", 1.0)
    assert config.softmax_scale == pytest.approx(scale, rel=1e-12)
    assert config.kv_lora_scale == pytest.approx(getattr(module, "mla_scale_kv_lora", 1.0), rel=1e-12)
    hidden = torch.randn(len(POSITIONS), config.hidden_size)
    seen = call(module, hidden, monkeypatch)
    if config.q_lora_rank is None:
        query = module.q_proj(hidden)
    else:
        latent = rms_norm(module.q_a_proj(hidden), module.q_a_layernorm.weight, config.rms_norm_eps)
        query = query_projection(module, config)(
            torch.cat([latent, module.q_a_proj(hidden)], -1) if config.query_gates else latent
        )
    query = query.unflatten(-1, (config.num_heads, config.query_width))[..., : config.qk_nope_head_dim]
    factor = torch.ones(len(POSITIONS))
    if config.llama_4_scaling is not None:
        beta, original = config.llama_4_scaling
        factor = torch.tensor([1 + beta * math.log(1 + position // original) for position in POSITIONS.tolist()])
    expected = query * config.softmax_scale * factor[:, None, None]
    torch.testing.assert_close(
        seen["query"][..., : config.qk_nope_head_dim] * seen["scaling"], expected, atol=1e-6, rtol=1e-5
    )


def test_other_architectures_are_refused() -> None:
    with pytest.raises(ValueError, match="architecture 'llama' is not an MLA model") as error:
        attention_of(transformers.LlamaConfig())
    assert all(model_type in str(error.value) for model_type in FAMILIES)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5, 40.0, 128])
@pytest.mark.parametrize("mscale", [0.707, 1.0, 2.0])
def test_yarn_mscale(factor: float, mscale: float) -> None:
    assert yarn_mscale(factor, mscale) == pytest.approx(yarn_get_mscale(factor, mscale), rel=1e-12)


def test_heads_per_rank() -> None:
    config = attention_of(make_config("deepseek_v3")).config
    assert {size: config.heads_per_rank(size) for size in (1, 3, 8, 24)} == {1: 24, 3: 8, 8: 3, 24: 1}
    choices = "choose 1, 2, 3, 4, 6, 8, 12 or 24"
    for size in (0, -1, 5, 7, 48):
        message = f"tensor_parallel_size (-tp) is {size}; it must divide the model's 24 attention heads: {choices}"
        with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
            config.heads_per_rank(size)


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
    ("field", "value", "types"),
    [
        ("index_topk_pattern", "FSX", ["full", "shared", "X"]),
        ("index_topk_pattern", "SFF", ["shared", "full", "full"]),
        ("index_topk_pattern", "FS", ["full", "shared"]),
        ("indexer_types", ["full", "half", "full"], ["full", "half", "full"]),
        ("indexer_types", ["shared", "full", "full"], ["shared", "full", "full"]),
        ("indexer_types", ["full", "shared"], ["full", "shared"]),
    ],
)
def test_layers_that_neither_select_nor_share(field: str, value: str | list[str], types: list[str]) -> None:
    config = transformers.DeepseekV32Config(num_hidden_layers=3, **{field: value})
    rule = "each of 3 layers has one, full or shared, and the first is full"
    with pytest.raises(ValueError, match="^" + re.escape(f"model: the config's {field} give {types}; {rule}") + "$"):
        attention_of(config)


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
