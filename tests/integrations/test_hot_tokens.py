"""Whole models with latents in host memory: the answers of transformers, while all rows of the device that are not hot
hold NaN, and the same features in use as without.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpmla.cache import hot_set
from dcpmla.cache.hot_set import HotSet
from dcpmla.config import DCPConfig
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.transfers import check_role
from dcpmla.llm import LLM
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.loop import _totals
from dcpmla.serving.messages import Report
from dcpmla.serving.metrics import Metrics
from tests.integrations.test_combinations import RowEngines, Served, check, save, words_of
from tests.support.combinations import Row
from tests.support.layouts import dcp_config
from tests.support.models import FAMILIES, save_tiny
from tests.support.oracle import Answer, Oracle
from tests.support.ranks import run_ranks
from tests.support.whole_models import answers_of, device_of, draw_prompts, load_engine_on_rank

MAX_LEN, TOPK = 160, 24
# Contexts of many times topk tokens, and short ones, in which all tokens are selected.
LENGTHS = (100, 130, 7, 61)


def poison(engine: Engine) -> list[HotSet]:
    """Fill what the device holds beside hot rows with NaN, before every step of an engine; return the layers' sets."""
    sets = [cache.hot for cache in engine.cache if cache.hot is not None]
    assert len(sets) == len(engine.cache.per_layer)

    def overwrite(_: str) -> None:
        sets[0].pool[sets[0].first_scratch :].view(torch.uint8).fill_(0xFF)
        for each in sets:
            rows = each.pool[each.first_row : each.first_row + len(each.slot_of)]
            rows.view(torch.uint8)[each.slot_of == 0] = 0xFF

    engine.on_step = overwrite
    return sets


def check_counts(sets: list[HotSet]) -> None:
    """Assert that each layer has found hot rows, and has fetched others."""
    counts = torch.stack([each.counts for each in sets])
    assert (counts[:, 1:3] > 0).all(), counts


def serve(engine: Engine, prompts: Sequence[Sequence[int]], num_new: int = 8) -> list[Answer]:
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
    requests = [engine.add(list(prompt), params, keep_logits=True) for prompt in prompts]
    list(engine.run())
    assert engine.allocator.num_free == engine.allocator.num_blocks
    return answers_of(requests)


def serve_twice(
    directory: Path, layouts: Sequence[DCPConfig], scratch_tokens: int, device_type: str = "cpu"
) -> list[list[Answer]]:
    """On one rank: serve prompts in each layout, then their answers and more as prompts, whose prefixes are found.

    Args:
        scratch_tokens: Tokens of a call of attention that find their rows, if no row is hot.
    """
    results = []
    prompts = draw_prompts(LENGTHS)
    for dcp in layouts:
        hot_set.SCRATCH_BYTES = scratch_tokens * TOPK * 24 * 4
        options = EngineOptions(max_num_seqs=4, max_num_batched_tokens=33, dtype="float32", kv_offloading_size=0.02)
        engine = load_engine_on_rank(directory, dcp, options, MAX_LEN, device_type)
        sets = poison(engine)
        for cache in engine.cache:
            cache.latents.view(torch.uint8).fill_(0xFF)
        first = serve(engine, prompts)
        turns = [[*prompt, *tokens, 5, 9] for prompt, (tokens, _) in zip(prompts, first, strict=True)]
        second = serve(engine, turns)
        check_counts(sets)
        results.append([*first, *second])
        engine.close()
    return results


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [
        (1, [dcp_config(1, 1, kv_hot_tokens=TOPK, block_size=8)]),
        (2, [dcp_config(2, 1, kv_hot_tokens=50, block_size=8), dcp_config(2, 2, kv_hot_tokens=TOPK, block_size=4)]),
        # One rank has all of a short context: twice the rows of its set.
        (2, [dcp_config(2, 2, 32, kv_hot_tokens=TOPK, block_size=32)]),
        (4, [dcp_config(4, 4, 2, kv_hot_tokens=90, block_size=4)]),
    ],
)
def test_answers(family: str, num_ranks: int, layouts: list[DCPConfig], tmp_path: Path) -> None:
    oracle, prompts = Oracle(save_tiny(family, tmp_path)), draw_prompts(LENGTHS)
    for results in run_ranks(num_ranks, serve_twice, tmp_path, layouts, 3, timeout=400):
        for answers in results:
            turns = [[*prompt, *tokens, 5, 9] for prompt, (tokens, _) in zip(prompts, answers, strict=False)]
            for prompt, (tokens, logits) in zip([*prompts, *turns], answers, strict=True):
                oracle.check(prompt, tokens, logits)


class HotRowEngines(RowEngines):
    """The engines of a row with as few hot tokens as a layer may have."""

    def _layout(self) -> DCPConfig:
        return replace(super()._layout(), kv_hot_tokens=TOPK)

    def _options(self) -> EngineOptions:
        options, plan = super()._options(), self._plan(1)
        assert options.kv_cache_memory_bytes is not None
        num_bytes = options.kv_cache_memory_bytes + plan.bytes_fixed
        return replace(options, kv_cache_memory_bytes=num_bytes, kv_offloading_size=0.02)

    def load(self) -> Engine:
        engine = super().load()
        self.sets = poison(engine)
        return engine

    def close(self, engine: Engine) -> None:
        check_counts(self.sets)
        super().close(engine)


def serve_row(directory: Path, row: Row, device_type: str) -> Served:
    """On one rank: serve a row's conversations, three tokens in a call of attention."""
    hot_set.SCRATCH_BYTES = 3 * TOPK * 24 * 4
    return HotRowEngines(row, directory, directory.with_name("disk"), device_of(device_type)).serve()


# By name: a family, and levels of `combinations.FACTORS`.
ROWS = {
    "V3.2, MTP, DCP": "deepseek_v32|dcp 2 by token|mtp|short steps|prefix hits|no tiers|preemption|exact|any order"
    "|graphs|free|two choices",
    "GLM-5, MTP": "glm_moe_dsa|tp 1|mtp|long steps|prefix hits|no tiers|ample|exact|any order|graphs|free|two choices",
    "GLM-5, fp8": "glm_moe_dsa|dcp 2 in groups|ngram|long steps|prefix hits|no tiers|preemption|8 bits|any order|eager"
    "|free|one choice",
    "HY V4": "hy_v4|tp 2|no drafts|short steps|prefix hits|no tiers|preemption|exact|any order|graphs|free|two choices",
    "A.X-K2": "axk2|tp 1|ngram|short steps|prefix hits|no tiers|ample|exact|any order|graphs|free|one choice",
}
CASES = [
    pytest.param(name, device, id=f"{name}-{device}", marks=marks[Row.parse(line).num_ranks])
    for name, line in ROWS.items()
    for device, marks in (("cpu", {1: (), 2: ()}), ("cuda", {1: pytest.mark.gpu, 2: pytest.mark.gpu_2}))
]


@pytest.mark.parametrize(("name", "device"), CASES)
def test_features(name: str, device: str, tmp_path: Path) -> None:
    """Drafts, steps in graphs, found prefixes, preempted requests, several choices, 8 bits."""
    row = Row.parse(ROWS[name])
    oracle = Oracle(save(row.family, tmp_path / "model"))
    for served in run_ranks(row.num_ranks, serve_row, tmp_path / "model", row, device, device=device, timeout=500):
        check(row, served, oracle, words_of(tmp_path / "model"))


@pytest.mark.parametrize(
    ("family", "num_tokens", "options", "words"),
    [
        ("deepseek_v3", 24, {}, r"layers of the model \(LatentSpec\) read more than the tokens"),
        ("mistral_large4_text", 24, {}, r"layers of the model \(FactoredSpec\)"),
        ("dots3_note_text", 24, {}, r"layers of the model \(WindowSpec\)"),
        ("glm5_next_text", 24, {}, r"layers of the model \(.*PooledSpec\)"),
        ("deepseek_v4", 24, {}, r"layers of the model \(.*Spec\)"),
        ("deepseek_v32", 23, {}, r"it must be at least 24"),
        ("deepseek_v32", 24, {"kv_offloading_size": None}, r"give its size, kv_offloading_size"),
        (
            "deepseek_v32",
            24,
            {"kv_offloading_path": "disk", "kv_offloading_disk_size": 1},
            r"leave kv_offloading_path \(--kv-offloading-path\) out",
        ),
    ],
)
def test_refusals(family: str, num_tokens: int, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    if family not in FAMILIES:
        pytest.skip("transformers lacks the family")
    save_tiny(family, tmp_path)
    options = {"kv_hot_tokens": num_tokens, "kv_offloading_size": 0.01, "dtype": "float32", **options}
    with pytest.raises(ValueError, match=rf"kv_hot_tokens \(--kv-hot-tokens\) is {num_tokens}.*{words}"):
        LLM(str(tmp_path), **options)


def test_servers_of_a_role_refuse() -> None:
    with pytest.raises(ValueError, match=r"role \(--role\) is decode, but kv_hot_tokens \(--kv-hot-tokens\) 24 keeps"):
        check_role("decode", DCPConfig(kv_hot_tokens=24))
    check_role("both", DCPConfig(kv_hot_tokens=24))


def test_host_memory_limits_the_blocks(tmp_path: Path) -> None:
    """The smaller of both memories decides; a step's counts are there to read."""
    save_tiny("deepseek_v32", tmp_path)
    options = {"kv_hot_tokens": TOPK, "block_size": 16, "dtype": "float32", "max_num_seqs": 2}
    row_bytes, num_layers = 24 * 4, 2
    with LLM(str(tmp_path), kv_offloading_size=100 * 16 * row_bytes * num_layers / 2**30, **options) as llm:
        engine = llm.engine
        assert engine.cache.sizes.num_blocks == min(100, 2 * 16)
        assert engine.offload is None
        assert engine.hot_counts is not None
        serve(engine, draw_prompts([100]))
        engine.hot_counts.totals()  # starts a copy
        counts = engine.hot_counts.totals()
        metrics = Metrics()
        metrics.state(Report([], 0, 0, 0, 0.0, {}))
        metrics.state(Report([], 0, 0, 0, 0.0, _totals(engine)))
    samples = [sample for each in metrics.registry.collect() for sample in each.samples]
    rows = [sample for sample in samples if sample.name == "dcpmla_kv_hot_rows_total"]
    exported = {(sample.labels["layer"], sample.labels["outcome"]): sample.value for sample in rows}
    assert exported == counts
    assert min(counts.values()) > 0
    assert counts.keys() == {(layer, name) for layer in "01" for name in ("hit", "miss")}
    for layer, cache in zip("01", engine.cache, strict=True):
        assert cache.hot is not None
        assert [counts[layer, "hit"], counts[layer, "miss"]] == cache.hot.counts[1:3].tolist()
    with LLM(str(tmp_path), kv_offloading_size=12.5 * 16 * row_bytes * num_layers / 2**30, **options) as llm:
        assert llm.engine.cache.sizes.num_blocks == 12
