"""`torch.compile(fullgraph=True)` of every kind of layer, in the steps of an engine: transformers' logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

from dcpmla.config import DCPConfig
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.runtime.sampling import SamplingParams
from tests.support.models import FAMILIES, LARGE4_SHARING, save_tiny
from tests.support.oracle import Oracle
from tests.support.plain_eagle3 import PlainEagle3, base_model
from tests.support.ranks import run_ranks
from tests.support.two_jobs import record_drafts
from tests.support.whole_models import load_engine_on_rank

PROMPT = [3 + index * 5 % 97 for index in range(37)]
# Layers of each class in dcpmla/attention, by families; GroupedAttention is of heads that draft.
CLASSES = {
    "deepseek_v32": {"MLAAttention"},
    "deepseek_v4": {"CompressedAttention"},
    "deepseek_v41": {"CompressedAttention"},
    "dots3_note_text": {"MLAAttention", "WindowAttention"},
    "glm5_next_text": {"DeltaAttention", "PooledAttention"},
    "hy_v4": {"MLAAttention"},
    "deepseek_v3": {"MLAAttention"},
    "mistral_large4_text": {"ReusingAttention", "FactoredAttention"},
}


def serve(directory: Path, dcp: DCPConfig) -> tuple[set[str], int, list[int], torch.Tensor]:
    """On one rank: return the classes of compiled layers, the number of graphs, new tokens, and their logits."""
    options = EngineOptions(dtype="float32", kv_cache_memory_bytes=1 << 24, max_num_seqs=2, max_num_batched_tokens=32)
    engine = load_engine_on_rank(directory, dcp, options, 64)
    torch._dynamo.config.recompile_limit = 100  # Layers share their code.
    layers = {kind_of(layer): layer for layer in layers_of(engine.model.hidden_states)}
    for layer in layers.values():
        layer.partial = torch.compile(layer.partial, fullgraph=True, backend="aot_eager")
    request = engine.add(PROMPT, SamplingParams(max_new_tokens=2, ignore_eos=True), keep_logits=True)
    list(engine.run())
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    classes = {type(layer).__name__ for layer in layers.values()}
    return classes, num_graphs, request.token_ids, torch.stack(request.logits)


def draft(model: Path, head: Path, compiles: bool) -> tuple[list[int], Any, int]:
    """On one rank: return new tokens, drafts, and the number of graphs of a head's layer."""
    options = EngineOptions(
        speculative_method="eagle3", speculative_model=str(head), dtype="float32", kv_cache_memory_bytes=1 << 22
    )
    engine = load_engine_on_rank(model, DCPConfig(block_size=64), options, 128)
    ((layer,),) = [layers_of(engine.model.drafts.module)]
    assert type(layer).__name__ == "GroupedAttention"
    if compiles:
        layer.partial = torch.compile(layer.partial, fullgraph=True, backend="aot_eager")
    record = record_drafts(engine.speculation.drafter)
    request = engine.add(PROMPT, SamplingParams(max_new_tokens=9, ignore_eos=True))
    list(engine.run())
    return request.token_ids, record, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def layers_of(module: torch.nn.Module) -> list[Any]:
    modules = module.modules()
    return [each for each in modules if hasattr(each, "partial") and "dcpmla.attention" in type(each).__module__]


def kind_of(layer: Any) -> Any:
    """Return what the code of a layer depends on: its class, and in DeepSeek-V4 its entries."""
    return type(layer), getattr(layer, "kind", None), getattr(layer, "indexer", None) is None


def test_all_classes_are_compiled() -> None:
    """Families' table has imported all kinds of attention."""
    found, classes = list[type](), [torch.nn.Module]
    while classes:
        classes = [each for parent in classes for each in parent.__subclasses__()]
        found += [each for each in classes if each.__module__.startswith("dcpmla.attention")]
    names = {each.__name__ for each in found if each.__name__.endswith("Attention")}
    assert names == {"GroupedAttention", *set.union(*CLASSES.values())}


@pytest.mark.parametrize("family", [family for family in CLASSES if family in (*FAMILIES, "deepseek_v41")])
def test_layers_are_one_graph(family: str, tmp_path: Path) -> None:
    reference = save_tiny(family, tmp_path, **(LARGE4_SHARING if family == "mistral_large4_text" else {}))
    dcp = DCPConfig(block_size=64, deterministic=family == "deepseek_v3")
    ((classes, num_graphs, tokens, logits),) = run_ranks(1, serve, tmp_path, dcp, timeout=500)
    assert classes == CLASSES[family]
    assert num_graphs >= 2 * len(classes)  # steps with a piece of a prompt, and decodes
    torch.testing.assert_close(logits, Oracle(reference).logits(PROMPT, tokens), atol=1e-3, rtol=0)


def test_a_head_s_layer_is_one_graph(tmp_path: Path) -> None:
    base = base_model()
    base.save_pretrained(tmp_path / "model")
    head = PlainEagle3(base, (2, 2, 1), is_dense=True, num_key_value_heads=4).save(
        tmp_path / "head", has_embedding=False
    )
    ((tokens, record, num_graphs),) = run_ranks(1, draft, tmp_path / "model", head, True, timeout=500)
    assert num_graphs >= 2
    assert record
    assert run_ranks(1, draft, tmp_path / "model", head, False) == [(tokens, record, 0)]
