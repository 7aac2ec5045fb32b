"""Memories of n-grams from a config and a tokenizer; test_variants.py has whole models with them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcpmla.attention.placement import Placement
from dcpmla.comm.reduce import CollectiveReduce
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.ngrams import NgramSizes, load_hash
from dcpmla.integrations.parts import Parts
from dcpmla.parallel.mesh import init_mesh
from tests.support.plain_ngrams import FIELDS, PRIMES, compress, save_tokenizer
from tests.support.plan_cases import CONFIGS
from tests.support.ranks import run_ranks
from tests.support.small_tokenizers import tokenizer_of

CPU = torch.device("cpu")


def config_of(**fields: Any) -> Any:
    """Return a config of the fields that are read."""
    values = {**FIELDS, "engram_compressed_vocab_size": 300, "num_hidden_layers": 4, "vocab_size": 97, **fields}
    return SimpleNamespace(**values)


def test_sizes_of_a_config() -> None:
    sizes = NgramSizes.of(config_of())
    assert sizes.primes() == PRIMES
    assert sizes.num_columns == 6
    mesh: Any = SimpleNamespace(tp_rank=1, tp_size=4)
    assert sizes.columns(mesh) == range(1, 3)
    assert (sizes.multipliers() % 2 == 1).all()
    assert int(sizes.multipliers().max()) * 299 < 2**63


def test_sizes_of_the_published_model() -> None:
    """The tables of DeepSeek-V4.1-Flash have exactly as many rows as their buckets; multipliers follow from numpy."""
    config = load_config(CONFIGS / "deepseek_v41_flash.json")
    assert [sum(primes) for primes in NgramSizes.of(config).primes()] == [384006168, 384016682]
    assert config.engram_num_embeddings == [384006168, 384016682]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engram_layer_ids": [1, 1]}, r"engram_layer_ids is \[1, 1\].*each layer must have one table"),
        ({"engram_layer_ids": [1]}, "each layer must have one table"),
        ({"engram_layer_ids": [1, 4]}, r"engram_layer_ids is \[1, 4\]; the model has layers 0 to 3"),
        ({"engram_num_embeddings": [700, 629]}, "engram_num_embeddings has 629 rows for layer 2.*need 630"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size is 1; it must be"),
        ({"engram_n_heads": None}, "engram_n_heads is missing; layers in engram_layer_ids need"),
        ({"engram_pad_token_id": 97}, "engram_pad_token_id is 97; it must be one of the 97 tokens"),
    ],
)
def test_bad_configs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NgramSizes.of(config_of(**fields))


def test_more_ranks_than_buckets() -> None:
    mesh: Any = SimpleNamespace(tp_rank=0, tp_size=8)
    with pytest.raises(ValueError, match="tensor_parallel_size .* is 8; the 6 buckets"):
        NgramSizes.of(config_of()).columns(mesh)


def parts_of(directory: Path, config: Any, dcp: DCPConfig, mesh: Any) -> Any:
    exchange = select_exchange(dcp, mesh.dcp_group, CPU).exchange
    model: Any = SimpleNamespace(config=config)
    of_experts: Any = None, None, None  # what no memory reads
    placement, reduce = Placement(dcp, mesh, exchange, torch.float32, CPU), CollectiveReduce(mesh.tp_group)
    return Parts(model, {}, {}, placement, False, "auto", *of_experts, reduce, 1e-6, directory)


def check_compressed_ids(tmp_path: Path) -> None:
    """Compare ids: spellings share an id; tokens past the tokenizer's are the pad token."""
    num_ids = save_tokenizer(tmp_path)
    ids = compress(tokenizer_of("byte_level"))
    config = config_of(engram_compressed_vocab_size=num_ids, vocab_size=len(ids) + 3, engram_pad_token_id=7)
    parts = parts_of(tmp_path, config, DCPConfig(), init_mesh(1, 1))
    hashes = load_hash(parts, NgramSizes.of(config))
    assert hashes.token_map.tolist() == [*ids, *[ids[7]] * 3]
    assert hashes.pad_id == ids[7]
    config.engram_compressed_vocab_size += 1
    with pytest.raises(
        ValueError, match=f"engram_compressed_vocab_size is {num_ids + 1}; the tokenizer in .* {num_ids}"
    ):
        load_hash(parts, NgramSizes.of(config))
    parts.directory = tmp_path / "none"
    parts.directory.mkdir()
    with pytest.raises(ValueError, match="has no tokenizer for its hashes of n-grams"):
        load_hash(parts, NgramSizes.of(config))


def test_compressed_ids(tmp_path: Path) -> None:
    run_ranks(1, check_compressed_ids, tmp_path)
