"""`dcpmla bench generate`: whole batches are timed, in each mode, and written as rows."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dcpmla.bench import generate as bench_generate
from dcpmla.bench import step_times
from dcpmla.config import DCPConfig
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.graph_sizes import GraphSize
from tests.support.benches import measure
from tests.support.graph_checks import open_model_on
from tests.support.models import save_tiny
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_process_on_cpu")
TINY = "generate --batch 1,3 --input-len 9 --output-len 6 --block-size 8"


def test_without_graphs(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measure(tmp_path, f"{TINY} --model {model} --batch 3,1,3")
    assert [(row["mode"], row["batch"]) for row in rows] == [("eager", 3), ("eager", 1)]
    for row in rows:
        assert row["tokens_per_second"] * row["step_us"] == pytest.approx(row["batch"] * 1e6, rel=0.05)
        expected = {"model": model.name, "tp": 1, "dcp": 1, "dtype": "float32", "input_len": 9, "output_len": 6}
        expected |= {"block_size": 8, "kv_cache_dtype": "float32", "decode_query_dtype": "auto"}
        assert {name: row[name] for name in expected} == expected
    assert "batch 3, eager: step_us " in capsys.readouterr().out


@pytest.mark.thorough
def test_drafts_of_a_forced_acceptance(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafts = "--speculative-method ngram --num-speculative-tokens 2 --acceptance 0,1 --acceptance-length 2"
    command = f"{TINY} --model {model} --output-len 14 --batch 2 {drafts}"
    plain, *drafted = measure(tmp_path, command)
    assert "acceptance" not in plain
    kinds = [(row.get("acceptance"), row.get("acceptance_length"), row["is_adaptive"]) for row in drafted]
    assert kinds == [(*kind, adapts) for kind in ((0, None), (1, None), (None, 2)) for adapts in (False, True)]
    assert [row["tokens_a_step"] for row in drafted if not row["is_adaptive"]] == [2, 6, pytest.approx(4, abs=0.5)]
    for row in drafted:
        assert row["tokens_per_second"] * row["step_us"] == pytest.approx(row["tokens_a_step"] * 1e6, rel=0.05)
        ratio = row["tokens_per_second"] / plain["tokens_per_second"]
        assert row["speedup_over_no_drafts"] == pytest.approx(ratio, rel=1e-2)
    assert "eager, acceptance 1.0, is_adaptive" in capsys.readouterr().out


@pytest.mark.thorough
def test_both_modes_in_one_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole batches only, every mode its own; where there is no GPU, a graph that is not captured stands for one."""
    decodes: list[tuple[str, bool]] = []
    build_engine = bench_generate.build_engine

    def build(*arguments: Any) -> Any:
        engine, selection = build_engine(*arguments)
        token = torch.tensor(0)
        model, mesh = engine.model, engine.mesh
        steps = model.attention.step_builder(engine.cache.sizes, engine.dcp, mesh.dcp_rank, model.device)
        engine.graph = StepGraph.decodes(model.decode, token, engine.cache, steps, mesh, 3, engine.max_model_len)
        enter = engine.on_step
        engine.on_step = lambda line: (
            (enter(line), decodes.append((line.partition("(")[2][:10], "graph" in line))) if line[0] == "d" else None
        )
        return engine, selection

    monkeypatch.setattr(bench_generate, "build_engine", build)
    monkeypatch.setattr(step_times, "is_h200", lambda device: True)
    rows = measure(tmp_path, f"{TINY} --model {model} --dtype bfloat16")
    graphs = rows[::2]
    assert 0 < graphs[0]["floor_us"] <= graphs[1]["floor_us"]
    assert all(row["floor_share"] == pytest.approx(row["floor_us"] / row["device_us"], abs=1e-3) for row in graphs)
    assert "floor_us" not in rows[1]
    assert [(row["mode"], row["batch"]) for row in rows] == [("graph", 1), ("eager", 1), ("graph", 3), ("eager", 3)]
    for requests in ("1 requests", "3 requests"):
        assert decodes.count((requests, True)) == decodes.count((requests, False)) == 5
    for graph, eager in zip(graphs, rows[1::2], strict=True):
        ratio = graph["step_us"] / eager["step_us"]
        assert eager["speedup_over_graph"] == pytest.approx(ratio, rel=1e-2)


@pytest.mark.thorough
def test_steps_with_prompts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone and beside 32 decodes, if the step has room; padded as graphs are, and eager."""
    build_engine, sizes = bench_generate.build_engine, list[GraphSize]()

    def build(*arguments: Any) -> Any:
        engine, selection = build_engine(*arguments)
        steps = engine.model.attention.step_builder(engine.cache.sizes, engine.dcp, 0, engine.model.device)
        limits = 64, 64, engine.max_model_len
        mixed = StepGraph.prompts(engine.model, engine.cache, steps, engine.mesh, *limits, tokens_per_request=4)
        size = mixed.prompt_size
        monkeypatch.setattr(mixed, "prompt_size", lambda *step: sizes.append(size(*step)) or sizes[-1])
        engine.graph, engine.mixed_graph = object(), mixed
        return engine, selection

    monkeypatch.setattr(bench_generate, "build_engine", build)
    monkeypatch.setattr(bench_generate.Generate, "close", lambda self: None)
    monkeypatch.setattr(bench_generate, "decode_steps", lambda engine, batch, *_: [(1.0, batch)])
    monkeypatch.setattr(bench_generate.Generate, "_device_times", lambda self, *_: {})
    monkeypatch.setattr(bench_generate.Generate, "_prefill_times", lambda self: {})
    command = f"{TINY} --model {model} --batch 1 --step-tokens 20,50 --max-num-batched-tokens 64"
    rows = [row for row in measure(tmp_path, command) if "tokens" in row]
    cases = [(tokens, decodes, mode) for tokens, decodes in ((20, 0), (50, 0), (50, 32)) for mode in ("graph", "eager")]
    assert [(row["tokens"], row["decodes"], row["mode"]) for row in rows] == cases
    assert all(row["step_us"] > 0 and row["input_len"] == 9 for row in rows)
    assert [found.num_tokens for found in sizes if found] == [32, 64, 64]
    assert "batch 32, graph, tokens 50: step_us " in capsys.readouterr().out


@pytest.mark.thorough
def test_steps_over_contexts_without_prefills(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On H200s the planner's time is beside the measured one."""
    monkeypatch.setattr(step_times, "_SECONDS", 0.05)
    monkeypatch.setattr(step_times, "is_h200", lambda _: True)
    monkeypatch.setattr(step_times, "format_name", lambda _: "bf16")
    command = f"{TINY} --model {model} --batch 1,2 --context 17,40"
    rows = [row for row in measure(tmp_path, command) if "step_us" not in row]
    assert [(row["batch"], row["input_len"]) for row in rows] == [(1, 17), (2, 17), (1, 40), (2, 40)]
    for row in rows:
        assert row["device_us"] > 0
        assert row["predicted_us"] > row["floor_us"] > 0
    assert "batch 2, eager, context 40: device_us " in capsys.readouterr().out


def check_times(directory: Path, has_blocks: bool) -> None:
    dcp = DCPConfig(block_size=8)
    model, mesh = open_model_on(directory, dcp, False, "cpu")
    cache = model.attention.plan_cache(dcp, [20] * 3, model.dtype, 3).allocate(model.device)
    with patch.object(step_times, "_SECONDS", 0.05):
        times = step_times.step_times(model, cache, dcp, mesh, 3, 17)
    assert times["device_us"] > 0
    assert (times["us_per_moe_layer"] > 0) == has_blocks


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "has_blocks"), [("deepseek_v3", True), ("deepseek_v4", True), ("longcat_flash", False)]
)
def test_steps_without_an_engine(family: str, has_blocks: bool, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    run_ranks(1, check_times, tmp_path, has_blocks)
