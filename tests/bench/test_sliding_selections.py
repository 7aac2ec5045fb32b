"""Steps with forced rates of hot rows: the selections against their definition, the rates by each set's counts, and the
same logits as with all latents on the device.
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dcpmla.attention.backends.calls import decode_workspace
from dcpmla.attention.select.selector import TokenSelector
from dcpmla.attention.select.slots import SlotLayout
from dcpmla.attention.step.table import StepRequests
from dcpmla.bench import step_times
from dcpmla.bench.sliding_selections import SlidingSelections, sliding_step_times
from dcpmla.bench.timing import Timing, time_operation
from dcpmla.cache.formats import row_width
from dcpmla.cache.hot import fetch_hot_rows
from dcpmla.cache.hot_set import HotSet, HotSizes
from dcpmla.cache.layers import Cache, LayerCache
from dcpmla.config import DCPConfig
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.ownership import Owner
from tests.support.benches import measure, refuse
from tests.support.graph_checks import open_model_on
from tests.support.layouts import dcp_config
from tests.support.models import save_tiny
from tests.support.ranks import run_ranks

TOPK, BLOCK = 24, 8
RATES = 1.0, 0.75, 0.75, 0.0
TINY = f"generate --input-len 9 --output-len 6 --block-size {BLOCK} --kv-offloading-size 0.01"


@pytest.fixture
def sparse_model(tmp_path: Path) -> Path:
    save_tiny("deepseek_v32", tmp_path / "model")
    return tmp_path / "model"


# ---- selections


def positions_of(table: Tensor, owners: list[Owner], selections: list[SlidingSelections]) -> list[list[list[int]]]:
    """Return the positions in each selection of each request, found by their slots on all ranks."""
    position_of = {}
    for owner in owners:
        for request, blocks in enumerate(table.tolist()):
            for index in range(len(blocks) * BLOCK):
                slot = blocks[index // BLOCK] * BLOCK + index % BLOCK
                position_of[owner.rank, slot] = request, owner.global_position(index)
    found = []
    for number in range(len(selections[0].slots)):
        of_requests: list[list[int]] = [[] for _ in table]
        for owner, each in zip(owners, selections, strict=True):
            for row, (slots, count) in enumerate(zip(each.slots[number], each.num_slots[number], strict=True)):
                for slot in slots[: int(count)].tolist():
                    request, position = position_of[owner.rank, slot]
                    assert request == row
                    of_requests[row].append(position)
        found.append(of_requests)
    return found


@pytest.mark.parametrize(("num_ranks", "interleave"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("hit_rate", [1.0, 0.75, 0.0])
def test_selections_slide(num_ranks: int, interleave: int, hit_rate: float) -> None:
    """Distinct tokens, all ranks together topk; a share in every selection, the rest in one alone; never the newest."""
    context, num_kept = 301, round(TOPK * hit_rate)
    table = torch.randperm(2 * 40).view(2, 40).int()
    owners = [Owner(rank, num_ranks, interleave) for rank in range(num_ranks)]
    layouts = [SlotLayout(table, torch.arange(2).int(), BLOCK, owner) for owner in owners]
    selections = [SlidingSelections(layout, context, TOPK, hit_rate) for layout in layouts]
    found = positions_of(table, owners, selections)
    assert len(found) == (1 if num_kept == TOPK else (context - 1 - num_kept) // (TOPK - num_kept))
    for request in range(2):
        chosen = [set(of_requests[request]) for of_requests in found]
        assert all(
            len(each) == len(of_requests[request]) == TOPK for each, of_requests in zip(chosen, found, strict=True)
        )
        assert max(map(max, chosen)) < context - 1
        kept = set.intersection(*chosen) if len(chosen) > 1 else set(sorted(chosen[0])[:num_kept])
        assert len(kept) == num_kept
        assert len(set.union(*chosen)) == num_kept + len(chosen) * (TOPK - num_kept)
    assert found[0][0] != found[0][1]


def test_settled_sets_are_full() -> None:
    """Of rows of other requests and of the first selection, whatever they had."""
    sizes, num_used = HotSizes(2, 90, TOPK, 6, torch.float32), 2 * 10 * BLOCK
    sets = HotSet.of(sizes, [torch.zeros(shape, dtype=dtype) for shape, dtype in sizes.tensors(num_used + 200)])
    layers = [LayerCache(torch.randn(num_used // BLOCK + 25, BLOCK, 6), hot=hot) for hot in sets]
    layout = SlotLayout(torch.arange(20).view(2, 10).int(), torch.arange(2).int(), BLOCK, Owner())
    selections = SlidingSelections(layout, 80, TOPK, 0.5)
    first = set(selections.slots[0].flatten().tolist())
    for each in sets:
        fetch_hot_rows(each, layers[0].latents, torch.arange(30, 42).int()[None], torch.tensor([12]).int())
    selections.settle(layers, num_used)
    for each in sets:
        slots = set((each.slot_of[each.slot_of > 0] - 1).tolist())
        assert first < slots
        assert all(slot >= num_used for slot in slots - first)
        assert len(slots) == sizes.num_rows


# ---- whole models


def caches_of(model: ShardedModel, dcp: DCPConfig, context: int, batch: int) -> Cache:
    return model.attention.plan_cache(dcp, [context] * batch, model.dtype).allocate(model.device)


def check_rates(directory: Path, dcp: DCPConfig, device_type: str) -> list[dict[str, float]]:
    """On one rank: time steps at several rates over one cache; return the fields of counts at each."""
    model, mesh = open_model_on(directory, dcp, False, device_type)
    cache, rows, timings = caches_of(model, dcp, 200, 2), [], []

    def timed(*args: Any) -> Timing:
        timings.append(time_operation(*args))
        return timings[-1]

    with patch.object(step_times, "_SECONDS", 0.01), patch.object(step_times, "time_operation", timed):
        for hit_rate in RATES:
            times = sliding_step_times(model, cache, dcp, mesh, 2, 200, hit_rate)
            assert times["device_us"] > 0
            assert times["us_per_moe_layer"] > 0
            rows.append({name: times[name] for name in ("counted_hit_rate", "fetched_bytes", "num_hot_rows")})
    assert [timing.in_graph for timing in timings] == [device_type == "cuda"] * 2 * len(RATES)
    return rows


LAYOUTS = [dcp_config(1, 1), dcp_config(2, 1), dcp_config(2, 2), dcp_config(4, 4, 2)]
CASES = [
    pytest.param(layout, "cpu", id=f"tp{layout.tensor_parallel_size}-dcp{layout.decode_context_parallel_size}")
    for layout in LAYOUTS
] + [
    pytest.param(LAYOUTS[0], "cuda", id="one-gpu", marks=pytest.mark.gpu),
    pytest.param(LAYOUTS[2], "cuda", id="two-gpus", marks=pytest.mark.gpu_2),
]


@pytest.mark.parametrize(("dcp", "device"), CASES)
def test_rates_are_as_asked(dcp: DCPConfig, device: str, sparse_model: Path) -> None:
    """At each rate after another; bytes that a rank fetches fall with the number of ranks that share a cache."""
    num_hot, num_layers, row_bytes = 300, 2, 4 * row_width(torch.float32, 16, 8)
    hot = replace(dcp, kv_hot_tokens=num_hot, block_size=BLOCK)
    size = dcp.decode_context_parallel_size
    for rows in run_ranks(dcp.tensor_parallel_size, check_rates, sparse_model, hot, device, device=device):
        # A GPU is timed over more steps, so positions of the short contexts come again.
        slack = 0.02 if device == "cuda" else 0
        for row, hit_rate in zip(rows, RATES, strict=True):
            assert abs(row["counted_hit_rate"] - hit_rate) <= slack
            assert row["num_hot_rows"] == -(-num_hot // size)
            expected = (1 - hit_rate) * 2 * TOPK * num_layers * row_bytes / size
            # The rank with most has more than its share of few rows.
            assert expected * (1 - slack) <= row["fetched_bytes"] <= expected * (1 + slack if size == 1 else 1.5)


def check_logits(directory: Path, dcp: DCPConfig) -> None:
    """Assert on one rank that forced steps have the same logits over both caches, and others than indexers choose."""
    model, mesh = open_model_on(directory, dcp, False, "cpu")
    context, batch, logits = 100, 2, []
    steps_of = {True: dcp, False: replace(dcp, kv_hot_tokens=None)}
    torch.manual_seed(mesh.dcp_rank)
    latents = torch.randn_like(caches_of(model, steps_of[False], context, batch)[0].latents)
    keys = torch.randn(len(latents), BLOCK, 16)
    table = torch.arange(len(latents)).view(batch, -1)
    layout = SlotLayout(table.int(), torch.arange(batch).int(), BLOCK, dcp.owner(mesh.dcp_rank))
    for is_hot, is_forced in ((True, True), (False, True), (False, False)):
        cache = caches_of(model, steps_of[is_hot], context, batch)
        for layer in cache:
            layer.latents.copy_(latents)
            if layer.index_keys is not None:
                layer.index_keys.copy_(keys)
        builder = model.attention.step_builder(cache.sizes, steps_of[is_hot], mesh.dcp_rank, model.device)
        requests = StepRequests([1] * batch, [context] * batch, table.tolist(), list(range(batch)))
        step = builder.build(requests, workspace=decode_workspace(model.device))
        selections = SlidingSelections(layout, context, TOPK, 0.5)
        select = TokenSelector.select
        with (
            selections.replacing(model.hidden_states) if is_forced else nullcontext(),
            patch.object(TokenSelector, "select", autospec=True, side_effect=select) as run,
        ):
            found = [model.decode(torch.tensor([5, 9]), step, cache).clone() for _ in range(4)]
        # Indexers work in forced steps, too.
        assert run.call_count == 4 * model.attention.num_index_layers
        logits.append(torch.stack(found))
    hot, plain, chosen = logits
    assert torch.equal(hot, plain)
    assert not (hot[0] - hot[1]).abs().max() < 1e-4
    assert (chosen[0] == chosen).all()
    assert (hot - chosen).abs().amax((1, 2)).min() > 1e-4


@pytest.mark.parametrize(("family", "dcp"), [("deepseek_v32", LAYOUTS[2]), ("glm_moe_dsa", LAYOUTS[0])])
def test_forced_selections_are_what_attention_reads(family: str, dcp: DCPConfig, tmp_path: Path) -> None:
    """Also in layers that reuse a selection."""
    save_tiny(family, tmp_path)
    hot = replace(dcp, kv_hot_tokens=60, block_size=BLOCK)
    run_ranks(dcp.tensor_parallel_size, check_logits, tmp_path, hot)


# ---- the benchmark


def test_bench_generate(
    sparse_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    one_process_on_cpu: None,
) -> None:
    """A baseline for each load, then the rates in the order asked for; nothing else is timed."""
    monkeypatch.setattr(step_times, "_SECONDS", 0.01)
    command = f"{TINY} --model {sparse_model} --batch 1,2 --context 90 --kv-hot-tokens 60 --hit-rates 1,0.5"
    rows = measure(tmp_path, command)
    assert [(row["batch"], row.get("hit_rate")) for row in rows] == [
        (n, rate) for n in (1, 2) for rate in (None, 1, 0.5)
    ]
    for baseline, *forced in (rows[:3], rows[3:]):
        assert not {"kv_hot_tokens", "counted_hit_rate", "speedup_over_gpu_latents"} & baseline.keys()
        for row in forced:
            assert row["counted_hit_rate"] == row["hit_rate"]
            assert (row["kv_hot_tokens"], row["num_hot_rows"], row["input_len"]) == (60, 60, 90)
            assert row["selections"] == "sliding"
            ratio = baseline["us_per_moe_layer"] / row["us_per_moe_layer"]
            assert row["speedup_over_gpu_latents"] == pytest.approx(ratio, rel=0.02, abs=2e-3)
    assert "batch 2, eager, context 90, hit_rate 0.5: counted_hit_rate 0.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--batch 1 --context 90", "give the number of hot tokens, --kv-hot-tokens, and cached ones, --context"),
        ("--batch 1 --kv-hot-tokens 60", "give the number of hot tokens, --kv-hot-tokens, and cached ones, --context"),
        ("--batch 1 --context 24 --kv-hot-tokens 60", "--context has 24; it must be more than 24"),
        ("--batch 3 --context 90 --kv-hot-tokens 60", "--batch has 3 and --kv-hot-tokens is 60; a step selects 72"),
        ("--batch 1 --context 61 --kv-hot-tokens 60", "--batch has 1 and --context 61; these tokens fit in"),
    ],
)
def test_refusals(
    options: str, message: str, sparse_model: Path, capfd: pytest.CaptureFixture[str], one_process_on_cpu: None
) -> None:
    refuse(f"{TINY} --model {sparse_model} --hit-rates 0.5 {options}", message, capfd)
