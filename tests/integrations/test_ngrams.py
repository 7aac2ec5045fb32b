"""Memories of n-grams from a config, a tokenizer and a checkpoint, and in whole models: chunks, prefixes that are found
again, drafts and graphs give what the whole sequence gives at once.

The models are DeepSeek-V4's with memories added. The hashes that they are compared with come from plain Python.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dcpmla.attention.placement import Placement
from dcpmla.attention.step.table import StepRequests
from dcpmla.comm.reduce import CollectiveReduce
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.checkpoint import Checkpoint
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.ngrams import NgramSizes, load_hash, load_memory
from dcpmla.integrations.parts import Parts
from dcpmla.integrations.transformers import load_model
from dcpmla.parallel.mesh import init_mesh
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.sampling import SamplingParams
from tests.support.costs import DrawnCosts
from tests.support.engines import new_engine
from tests.support.layouts import dcp_config
from tests.support.models import VOCAB_SIZE, save_tiny
from tests.support.plain_ngrams import FIELDS, PRIMES, PlainHash, compress, save_tokenizer
from tests.support.quantized_models import quantize
from tests.support.ranks import run_ranks
from tests.support.recorded import RecordedDrafter
from tests.support.recording import capture
from tests.support.small_tokenizers import tokenizer_of

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 2, 7, 7, 1, 30], [11, 12], [*range(40, 71)]]
NUM_NEW = 9


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
    config = config_of(
        engram_layer_ids=[1, 14],
        engram_num_embeddings=[384006168, 384016682],
        engram_n_heads=8,
        engram_head_dim=256,
        engram_vocab_size=16_000_000,
        engram_compressed_vocab_size=99092,
        num_hidden_layers=43,
        vocab_size=129280,
    )
    sizes = NgramSizes.of(config)
    assert [sum(primes) for primes in sizes.primes()] == config.engram_num_embeddings


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
    weights = Checkpoint(directory / "memories", (32, 32)).weights("") if (directory / "memories").exists() else {}
    model: Any = SimpleNamespace(config=config)
    of_experts: Any = None, None, None  # what no memory reads
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    placement, reduce = Placement(dcp, mesh, exchange, torch.float32, CPU), CollectiveReduce(mesh.tp_group)
    return Parts(model, weights, shapes, placement, False, "auto", *of_experts, reduce, 1e-6, directory)


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


def save_model(directory: Path) -> None:
    """Save a tiny DeepSeek-V4, a tokenizer, and memories in fp8, with scales of rows' groups and of blocks."""
    save_tiny("deepseek_v4", directory)
    save_tokenizer(directory)
    config, generator, tensors = load_config(directory), torch.Generator().manual_seed(2), {}
    width, num_streams = config.hidden_size, config.hc_mult
    for layer, num_rows in zip(FIELDS["engram_layer_ids"], FIELDS["engram_num_embeddings"], strict=True):
        name = f"layers.{layer}.engram"
        shape = (num_streams + 1) * width, 6 * FIELDS["engram_head_dim"]
        for which, size, block in (("embed", (num_rows, 64), (1, 32)), ("kv_proj", shape, (32, 32))):
            codes, scales = quantize(torch.randn(size, generator=generator) / size[1] ** 0.5, block, True)
            tensors |= {f"{name}.{which}.weight": codes}
            tensors |= {f"{name}.{which}.weight_scale_inv": scales.to(torch.float8_e8m0fnu)}
        for which in "qk":
            weight = torch.rand(num_streams, width, generator=generator) + 0.5
            tensors[f"{name}.{which}_weight"] = weight.bfloat16()
    (directory / "memories").mkdir()
    save_file(tensors, directory / "memories" / "model.safetensors")


def open_model(directory: Path, tp: int, dcp: DCPConfig) -> tuple[Any, Any]:
    """Load the model and its memories."""
    mesh, config = init_mesh(tp, dcp.decode_context_parallel_size), load_config(directory)
    selection = select_exchange(dcp, mesh.dcp_group, CPU)
    model = load_model(directory, config, dcp, mesh, selection, torch.float32, CPU)
    num_ids = max(compress(tokenizer_of("byte_level"))) + 1
    for name, value in {**FIELDS, "engram_compressed_vocab_size": num_ids}.items():
        setattr(config, name, value)
    parts, sizes, decoder = parts_of(directory, config, dcp, mesh), NgramSizes.of(config), model.hidden_states
    decoder.ngrams = load_hash(parts, sizes)
    for number, layer in enumerate(sizes.layer_ids):
        decoder.blocks[layer].memory = load_memory(parts, f"layers.{layer}.engram", number, sizes)
    model.attention = replace(model.attention, keeps_token_ids=True)  # type: ignore[type-var]
    return model, mesh


def new_cache(model: Any, dcp: DCPConfig, num_drafts: int) -> Any:
    """Return a cache of values that no step may read."""
    cache = model.attention.plan_cache(dcp, [64] * 4, model.dtype, 8, num_drafts).allocate(CPU)
    for memory in cache.tensors:
        memory.fill_(torch.nan if memory.is_floating_point() else 10**6)
    return cache


def serve(model: Any, mesh: Any, dcp: DCPConfig, chunk: int, drafter: Any, graphs: bool) -> list[Any]:
    """Return each sequence and the logits of its new tokens; then of sequences that begin with the same tokens."""
    num_drafts = 0 if drafter is None else drafter.num_speculative_tokens
    cache, options = new_cache(model, dcp, num_drafts), {}
    if graphs:
        steps = model.attention.step_builder(cache.sizes, dcp, mesh.dcp_rank, CPU)
        costs = DrawnCosts(0, absorbs=steps.layout.traits.absorbs_pieces)
        graph = StepGraph.decodes(model.decode, torch.tensor(0), cache, steps, mesh, 4, 100, 1 + num_drafts)
        mixed = StepGraph.prompts(model, cache, steps, mesh, chunk, 4, 100, costs.tokens_per_request)
        options = {"graph": graph, "mixed_graph": mixed, "costs": costs}
        if mesh.tp_size == 1:  # a recording holds no collectives
            capture(graph)
            capture(mixed)
    engine = new_engine(model, cache, dcp, mesh, 100, chunk, 4, drafter=drafter, **options)
    params = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
    requests = [engine.add(prompt, params, request_id=index, keep_logits=True) for index, prompt in enumerate(PROMPTS)]
    list(engine.run())
    known = [prompt + request.token_ids[:-3] for prompt, request in zip(PROMPTS, requests, strict=True)]
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    again = [
        engine.add(prompt, params, request_id=len(PROMPTS) + index, keep_logits=True)
        for index, prompt in enumerate(known)
    ]
    list(engine.run())
    assert any(request.num_cached_tokens > len(prompt) for prompt, request in zip(PROMPTS, again, strict=True))
    engine.close()
    return [(r.prompt_token_ids + r.token_ids, torch.stack(r.logits)) for r in [*requests, *again]]


def serve_all(directory: Path, tp: int, dcp_size: int) -> list[list[Any]]:
    """Return a rank's outcomes in chunks of odd sizes, in graphs, and with drafts, mostly right ones."""
    dcp = dcp_config(tp, dcp_size, dcp_size, block_size=4, context_workspace_tokens=16 * dcp_size * dcp_size)
    model, mesh = open_model(directory, tp, dcp)
    outcomes = [serve(model, mesh, dcp, chunk, None, graphs) for chunk, graphs in ((64, False), (7, False), (13, True))]
    recorded = {index: tokens[-NUM_NEW:] for index, (tokens, _) in enumerate(outcomes[0])}
    recorded |= {index: tokens[-3:] for index, (tokens, _) in enumerate(outcomes[0]) if index >= len(PROMPTS)}
    for graphs in (False, True):
        drafter = RecordedDrafter(3, recorded, 0.7, VOCAB_SIZE)
        outcomes.append(serve(model, mesh, dcp, 13, drafter, graphs))
    return outcomes


def whole_sequences(directory: Path, sequences: list[list[int]]) -> list[Tensor]:
    """Return the logits of whole sequences, each computed at once, with hashes from plain Python."""
    dcp = DCPConfig(block_size=4)
    model, _ = open_model(directory, 1, dcp)
    module = model.hidden_states.ngrams
    model.hidden_states.ngrams = PlainHash(module.token_map.tolist(), module.pad_id, module.multipliers.tolist())
    steps_of = model.attention.step_builder
    results = []
    for tokens in sequences:
        cache = new_cache(model, dcp, 0)
        requests = StepRequests([len(tokens)], [len(tokens)], [[*range(cache.sizes.num_blocks)]], [0])
        step = steps_of(cache.sizes, dcp, 0, CPU).build(requests)
        results.append(model.logits(model.hidden(torch.tensor(tokens), step, cache)))
    for block in model.hidden_states.blocks:
        block.memory = None
    cache = new_cache(model, dcp, 0)  # the last sequence again
    without = model.logits(model.hidden(torch.tensor(sequences[-1]), step, cache))
    assert (without - results[-1]).abs().max() > 0.05
    return results


@pytest.mark.parametrize(("tp", "dcp_size"), [(1, 1), (2, 2)])
def test_whole_models(tp: int, dcp_size: int, tmp_path: Path) -> None:
    save_model(tmp_path)
    ranks = run_ranks(tp, serve_all, tmp_path, tp, dcp_size)
    sequences = [tokens for tokens, _ in ranks[0][0]]
    (expected,) = run_ranks(1, whole_sequences, tmp_path, sequences)
    for outcomes in ranks:
        for outcome in outcomes:
            for (tokens, logits), whole, sequence in zip(outcome, expected, sequences, strict=True):
                torch.testing.assert_close(logits, whole[-len(logits) - 1 : -1], atol=1e-4, rtol=0)
                assert tokens == sequence
