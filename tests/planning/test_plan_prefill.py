"""Modelled times of prompts' pieces, and of steps that have some: sums over parameters and tokens, measured times, the
bound of a mixed step, the steps that the engine makes.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.attention.costs import Rates, RouteCosts
from dcpmla.attention.layers.compressed.config import CompressedConfig
from dcpmla.attention.layers.linear.spec import DeltaSpec
from dcpmla.bench.geometries import config_of
from dcpmla.cache.blocks import BlockAllocator
from dcpmla.cli.plan_prompts import PromptPlan
from dcpmla.config import MLAConfig
from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from dcpmla.llm import LLM
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.machine import H200X8, Machine
from dcpmla.planning.mixed import MixedSteps
from dcpmla.planning.prefill import PrefillCosts, kernel_rates, token_us
from dcpmla.planning.presets import PRESETS
from dcpmla.planning.recommend import make_plan
from dcpmla.planning.setting import Setting
from dcpmla.planning.weights import ModelSize
from dcpmla.runtime.pieces import PieceSizes, Room
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.scheduler import Scheduler
from tests.support.models import FAMILIES, tiny_config
from tests.support.plan_cases import (
    CONFIGS,
    FP8,
    RESULTS,
    deployed,
    read_glm5,
    read_v3,
    read_v4,
    read_v32,
    setting_of,
    within,
)

NEEDLE = Path(__file__).parents[2] / "examples" / "needle" / "model"
MODELS = [read_v3, read_v32, read_glm5, read_v4]
LAYOUTS = [(1, 1), (8, 1), (8, 4), (8, 8)]


@cache
def costs_of(index: int, tp: int, dcp: int, kv_cache_dtype: str = "bf16") -> PrefillCosts:
    return PrefillCosts(deployed(MODELS[index](), tp, dcp, kv_cache_dtype), 8192)


settings_of_models = st.builds(
    lambda index, layout, kv_cache_dtype: costs_of(index, *layout, kv_cache_dtype),
    st.integers(0, 3),
    st.sampled_from(LAYOUTS),
    st.sampled_from(["bf16", "fp8_ds_mla"]),
)


@pytest.mark.parametrize("read", MODELS)
@pytest.mark.parametrize("enable_expert_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 8])
def test_a_token_multiplies_with_every_parameter(
    read: Callable[[], ModelSize], enable_expert_parallel: bool, tp: int
) -> None:
    """It multiplies with the experts it picks. Two all-reduces a layer move twice its row, less this rank's part."""
    model, products, passes = read(), 0.0, 0
    for parameter in model.parameters:
        if parameter.is_matrix and not parameter.name.endswith(
            ("embed_tokens.weight", "lm_head.weight", "kv_b_proj.weight")
        ):
            share = model.experts_per_token / model.num_routed if parameter.is_expert else 1.0
            products += share * parameter.count * prod(parameter.shard_shape(tp, enable_expert_parallel))
            passes += 3 * parameter.count * parameter.shape[-1] if parameter.is_hyper_connection else 0
    hidden = model.attention.config.hidden_size
    assert H200X8.direct is not None
    sums_us = 2 * model.attention.num_layers * 2 * 2 * hidden * (1 - 1 / tp) / H200X8.direct.gb_per_s / 1e3
    expected = 2 * products / H200X8.matmul_tflops / 1e6 + sums_us + 2 * passes / H200X8.hbm_gb_per_s / 1e3
    deployment = deployed(model, tp, 1, enable_expert_parallel=enable_expert_parallel)
    assert token_us(deployment) == pytest.approx(expected)


@pytest.mark.parametrize("read", [read_v3, read_v32, read_glm5])
@pytest.mark.parametrize(("tp", "dcp"), LAYOUTS)
@pytest.mark.parametrize(("new", "context"), [(1, 0), (64, 65536), (300, 1000), (2048, 0), (4096, 100_000)])
def test_a_piece_is_its_tokens_and_the_cheaper_route(
    read: Callable[[], ModelSize], tp: int, dcp: int, new: int, context: int
) -> None:
    model, setting = read(), setting_of(tp, dcp, "fp8_ds_mla")
    attention = model.attention.config
    assert isinstance(attention, MLAConfig)
    routes = RouteCosts(attention, setting.dcp_config)
    layer_us = min(routes.absorbed_us(new, context), routes.mha_us(new, context, routes.num_tiles(new)))
    expected = new * token_us(Deployment(H200X8, model, setting)) + model.attention.num_layers * layer_us
    if attention.indexer is not None and context + new > attention.indexer.topk:
        num_scores = sum(range(context + 1, context + new + 1)) * attention.indexer.num_heads / dcp
        score_us = 2 * num_scores * attention.indexer.head_dim / H200X8.attention_tflops / 1e6
        expected += model.attention.num_index_layers * score_us
    costs = PrefillCosts(Deployment(H200X8, model, setting), 8192)
    assert costs.piece_us(new, context) == pytest.approx(expected)
    assert costs.tokens_per_request == routes.tokens_per_request
    pieces = [(new, context), (8, 50_000), (500, 9000)]
    assert costs.choose_absorbed(pieces) == routes.choose_absorbed(pieces)


@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (8, 4)])
@pytest.mark.parametrize(("new", "context"), [(1, 0), (64, 1 << 20), (3000, 0), (500, 1900)])
def test_a_piece_of_v4_is_a_sum_over_its_tokens(tp: int, dcp: int, new: int, context: int) -> None:
    """Of the rows that each token reads in each layer, of scores where a layer selects, and of entries gathered: where
    queries and outputs of all heads are fewer rows, of as many.
    """
    model, setting, end = read_v4(), setting_of(tp, dcp), context + new
    attention = model.attention.config
    assert isinstance(attention, CompressedConfig)
    read_us = 2 * attention.head_dim / H200X8.hbm_gb_per_s / 1e3
    row_us = max(read_us, 4 * attention.heads_per_rank(tp) * attention.head_dim / H200X8.attention_tflops / 1e6)
    num_rows = sum(
        number * layer.reads(position + 1).num_rows
        for position in range(context, end)
        for layer, number in model.attention.sorts.items()
    )
    num_entries, num_scores = 0.0, 0.0
    for kind in attention.layer_kinds:
        of_layer = end / kind.ratio if kind.ratio else 0
        if kind.has_indexer and end // kind.ratio > attention.indexer.topk:
            moved = 2 * new * attention.heads_per_rank(tp) * dcp
            of_layer = min(of_layer, max(moved, attention.indexer.topk))
            num_scores += sum(range(context + 1, end + 1)) / kind.ratio
        num_entries += of_layer
    gather_us = num_entries * 2 * attention.head_dim * (4 / 2700 + (1 - 1 / dcp) / 275) / 1e3
    score_us = 2 * num_scores * attention.indexer.num_heads * attention.indexer.head_dim / dcp / 650e6
    expected = new * token_us(Deployment(H200X8, model, setting)) + row_us * num_rows + gather_us + score_us
    costs = PrefillCosts(Deployment(H200X8, model, setting), 8192)
    rounding_us = row_us * new * len(attention.layer_kinds)  # parts of entries that a token does not see yet
    assert expected <= costs.piece_us(new, context) * (1 + 1e-9) <= expected + rounding_us
    assert (costs.tokens_per_request, costs.choose_absorbed([(8, 65536)] * 3)) == (1, [False] * 3)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("head_dim", [128, 4096])
def test_linear_attention_takes_the_same_time_for_each_token(tp: int, head_dim: int) -> None:
    """Of 128 columns, memory's; of wide heads, the products'."""
    stack = attention_of(load_config(CONFIGS / "kimi_k3.json"))
    dcp = setting_of(tp, tp).dcp_config
    (delta,) = (layer for layer in stack.sorts if isinstance(layer, DeltaSpec))
    assert stack.sorts[delta] == 69
    assert len(stack.sorts) == 2
    delta = replace(delta, config=replace(delta.config, head_dim=head_dim))
    wide = replace(stack, layers=tuple(delta if isinstance(layer, DeltaSpec) else layer for layer in stack.layers))
    costs, latents = wide.costs(dcp, Rates()), RouteCosts(stack.config, dcp)
    num_heads = 69 * 96 / tp
    products_us = 2 * num_heads * (3 * head_dim**2 + 1.5 * 64 * head_dim + 64**2 / 2) / 650e6
    memory_us = num_heads * head_dim * 80 / 2700e3
    assert (products_us > memory_us) == (head_dim == 4096)
    for piece in ((1, 0), (700, 5000)):
        expected = 24 * latents.piece_us(*piece) + piece[0] * max(products_us, memory_us)
        assert costs.piece_us(*piece) == pytest.approx(expected)


lengths = st.tuples(st.integers(1, 9000), st.integers(0, 1_000_000))


@given(costs=settings_of_models, piece=lengths, longer=lengths)
def test_longer_pieces_take_no_less(costs: PrefillCosts, piece: tuple[int, int], longer: tuple[int, int]) -> None:
    new, context = piece
    time = costs.piece_us(new, context)
    assert 0 < time < costs.piece_us(new + longer[0], context)
    assert time <= costs.piece_us(new, context + longer[1])


@given(costs=settings_of_models, limit=st.integers(1, 9000), context=st.integers(0, 1_000_000), share=st.floats(0, 1))
def test_pieces_fit_into_a_step(costs: PrefillCosts, limit: int, context: int, share: float) -> None:
    """A step's first piece may exceed the limit; others never do."""
    sizes, room_us = PieceSizes(costs, 9000), share * costs.max_prefill_us
    new = sizes.choose(context, limit, Room(0, limit, room_us, is_first=False))
    assert 0 <= new <= limit
    assert not new or costs.piece_us(new, context) <= room_us
    first = sizes.choose(context, limit, Room(0, limit, costs.max_prefill_us, is_first=True))
    assert max(1, new) <= first <= limit


@given(costs=settings_of_models, context=st.integers(0, 1_000_000))
def test_no_tile_and_no_selection_makes_a_token_more_cheaper(costs: PrefillCosts, context: int) -> None:
    """Around every size at which a route changes its tiles, or a layer starts to select."""
    for edge in (1, 8, 128, 256, 1056, 2048, max(1, 2048 - context), max(1, 8192 - context)):
        times = [costs.piece_us(new, context) for new in range(max(1, edge - 1), edge + 3)]
        assert times == sorted(times)
    for edge in (0, 128, 2048, 8192):
        times = [costs.piece_us(5, start) for start in range(max(0, edge - 7), edge + 3)]
        assert times == sorted(times)


def test_the_limit_of_a_mixed_step() -> None:
    """By default a step without a context, as large as steps get, just fits."""
    for index in range(len(MODELS)):
        costs = costs_of(index, 8, 8)
        assert costs.max_prefill_us == costs.piece_us(8192, 0)
        assert costs.piece_us(8193, 0) > costs.max_prefill_us < costs.piece_us(8192, 1000)
    assert PrefillCosts(deployed(read_v3(), 8, 8), 8192, 12.5).max_prefill_us == 12_500


def test_rates_of_kernels_follow_the_machine() -> None:
    assert kernel_rates(H200X8) == Rates()
    slower = replace(H200X8, matmul_tflops=350, copy_gb_per_s=1350, direct=None)
    rates = kernel_rates(slower)
    assert (rates.mha_tflops, rates.absorbed_tflops, rates.gb_per_s) == (300, 260, 1350)
    assert rates.link_gb_per_s == pytest.approx(H200X8.all_gather.gb_per_s)


@pytest.mark.usefixtures("one_process_on_cpu")
def test_an_engine_takes_the_limit() -> None:
    options: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 1 << 26}
    with LLM(NEEDLE, max_prefill_ms=2, **options) as llm:
        assert llm.engine.scheduler.costs.max_prefill_us == 2000
    for value in (0, float("nan"), "5"):
        with pytest.raises(ValueError, match=r"max_prefill_ms \(--max-prefill-ms\) is .*; it must be a finite number"):
            LLM(NEEDLE, max_prefill_ms=value, **options)


# An H100 reads 93 % of the published rate, as an H200 does.
H100 = PRESETS["h100x8"]
ALONE = setting_of(1, 1)


def steps_of(model: ModelSize, setting: Setting, num_decodes: int = 0, machine: Machine = H200X8) -> MixedSteps:
    costs = PrefillCosts(Deployment(machine, model, setting), 8192)
    return MixedSteps(costs, num_decodes, 4096)


def prompts_of(model: ModelSize, setting: Setting, batch: int, context: int, limit: int) -> PromptPlan:
    plan = make_plan(Deployment(H200X8, model, setting), batch, context)
    return PromptPlan(Deployment(H200X8, model, plan), batch, context, limit)


@pytest.mark.parametrize("read", [read_v3, read_v32, read_glm5])
@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (8, 4)])
def test_a_step_is_a_decode_step_and_a_piece(read: Callable[[], ModelSize], tp: int, dcp: int) -> None:
    """A piece of one token adds its attention, and a row to each product but kv_b_proj's."""
    model, setting = read(), setting_of(tp, dcp)
    step = steps_of(model, setting, 32).step_us(1, 1000, 33, is_one_graph=True)
    assert step["total"] == pytest.approx(step["products"] + step["piece"] + step["decodes"])
    assert step["piece"] == model.attention.costs(setting.dcp_config, kernel_rates(H200X8)).piece_us(1, 1000)
    low_us, high_us = (Deployment(H200X8, model, setting).step_us(batch, 4096)["total"] for batch in (32, 33))
    assert low_us < step["total"] - step["piece"] < high_us


def test_padding_costs_products_alone(v3: ModelSize) -> None:
    setting = setting_of(8, 8)
    steps = steps_of(v3, setting, 8)
    bare, padded = (steps.step_us(4000, 0, num_rows, is_one_graph=True) for num_rows in (4008, 5120))
    assert {**padded, "products": 0, "total": 0} == {**bare, "products": 0, "total": 0}
    assert padded["products"] - bare["products"] == pytest.approx(
        1112 * token_us(Deployment(H200X8, v3, setting)), rel=0.02
    )


def test_a_small_step_waits_for_launches_between_graphs() -> None:
    model = read_model(tiny_config("deepseek_v3"))
    whole, cut = (steps_of(model, ALONE).step_us(8, 0, 16, is_one_graph) for is_one_graph in (True, False))
    assert whole["launches"] == 0
    assert cut["total"] == 150 * model.attention.num_layers > whole["total"]
    assert sum(time for part, time in cut.items() if part != "total") == pytest.approx(cut["total"])


def test_first_tokens_as_measured() -> None:
    """DeepSeek-V2-Lite on one H100: 32 prompts of 1,024 tokens in steps of 512, whose first tokens took 553 ms on
    average.
    """
    model = read_model(config_of("v2-lite", dtype="bfloat16"))
    now_us, num_done, first_us = 0.0, 0, list[float]()
    while len(first_us) < 32:
        num_decodes, context = len(first_us), num_done % 1024
        num_done += 512 - num_decodes
        now_us += steps_of(model, ALONE, num_decodes, H100).step_us(512 - num_decodes, context, 512, True)["total"]
        first_us += [now_us] * (min(32, num_done // 1024) - num_decodes)
    assert within(sum(first_us) / 32, 553_000, 1.25)


@pytest.mark.parametrize(("num_tokens", "num_decodes", "kernels_ms"), [(256, 0, 3.5), (245, 10, 4.2), (4096, 0, 9)])
def test_kernels_as_measured(num_tokens: int, num_decodes: int, kernels_ms: float) -> None:
    """Seven layers of a rank's share of DeepSeek-V3 with TP 8, in fp8 on one H100."""
    widths = {"num_attention_heads": 16, "intermediate_size": 2304, "moe_intermediate_size": 256}
    layers = {"num_hidden_layers": 7, "first_k_dense_replace": 1, "quantization_config": FP8, "dtype": "bfloat16"}
    model = read_model(config_of("deepseek-v3", **widths, **layers))
    num_rows = num_tokens + num_decodes
    step = steps_of(model, ALONE, num_decodes, H100).step_us(num_tokens, 0, num_rows, is_one_graph=True)
    assert within(step["total"], 1e3 * kernels_ms, 1.25)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_step_of_a_large_prompt_as_measured(precision: str) -> None:
    """8,192 tokens through 4 layers of DeepSeek-V3 with 64 experts on one GPU; products count as bfloat16's."""
    rows = json.loads((RESULTS / "h200" / "step_8k.json").read_text())["rows"]
    (row,) = (row for row in rows if row["model"] == f"v3_{precision}" and "prefill_device_us" in row)
    sizes = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 64, "vocab_size": 16384}
    quantization = {"quantization_config": FP8} if precision == "fp8" else {}
    model = read_model(config_of("deepseek-v3", dtype="bfloat16", **sizes, **quantization))
    assert model.num_parameters == row["num_parameters"]
    step = steps_of(model, ALONE)
    assert within(step.step_us(8192, 0, 8192, False)["total"], row["prefill_device_us"], 1.25)
    costs = PrefillCosts(deployed(model, 1, 1), row["input_len"])
    assert within(costs.max_prefill_us, row["prefill_device_us"], 1.2)


@pytest.mark.parametrize(("num_tokens", "num_decodes", "limit"), [(9000, 0, 2048), (13_000, 8, 2048), (300, 8, 64)])
def test_prompts_are_cut_as_by_the_scheduler(num_tokens: int, num_decodes: int, limit: int) -> None:
    """With decodes, whose wait is limited, pieces after a context are smaller."""
    prompts = prompts_of(read_v3(), setting_of(8, 8), max(1, num_decodes), 4096, limit)
    scheduler = Scheduler(BlockAllocator(2000, 64), limit, 32, costs=prompts.costs)
    scheduler.waiting += [Request([name] * 2, SamplingParams(max_new_tokens=10_000)) for name in range(num_decodes)]
    prompt, pieces = Request([99] * num_tokens, SamplingParams(max_new_tokens=1)), list[tuple[int, int]]()
    while prompt.num_pending_tokens:
        for request, num_new, _ in scheduler.schedule(0.0).pieces:
            if request is prompt:
                pieces.append((num_new, request.num_computed_tokens))
            request.num_computed_tokens += num_new
            if request is not prompt:
                request.append(0, frozenset())
        if not pieces and prompt not in scheduler.waiting:
            scheduler.waiting.append(prompt)
    assert prompts.pieces(num_tokens, num_decodes) == pieces
    sizes = [new for new, _ in pieces[:-1]]
    assert (min(sizes) < max(sizes)) == (limit == 2048 and num_decodes > 0)
    first = prompts.first_token(num_tokens, num_decodes)
    assert first.num_steps == len(pieces)
    assert first.time_us == pytest.approx(sum(prompts.step(*piece, num_decodes).step_us["total"] for piece in pieces))


@pytest.mark.parametrize(("tp", "dcp"), [(8, 1), (8, 8)])
def test_long_prompts_beside_decodes_have_no_crumbs(tp: int, dcp: int) -> None:
    """8 prompts of 32,768 tokens arrive at once, 128 new tokens each. Pieces that do not end one have 512 tokens or
    more, and few steps have two; only a first piece takes longer than the limit.
    """
    costs, num_pieces, num_steps = costs_of(0, tp, dcp), 0, 0
    scheduler = Scheduler(BlockAllocator(5000, 64), 8192, 32, enable_prefix_caching=False, costs=costs)
    scheduler.waiting += [Request([name] * 32768, SamplingParams(max_new_tokens=128)) for name in range(8)]
    while scheduler.waiting or scheduler.running:
        batch = scheduler.schedule(0.0)
        pieces = [piece for piece in batch.pieces if piece.request.is_in_prompt]
        num_pieces, num_steps = num_pieces + len(pieces), num_steps + bool(pieces)
        assert len(pieces) == len(batch.pieces) or batch.room_us >= 0 or len(pieces) == 1
        assert all(piece.num_tokens in (piece.request.num_pending_tokens, *range(512, 8193)) for piece in pieces)
        for request, num_tokens, _ in batch.pieces:
            request.num_computed_tokens += num_tokens
            if not request.num_pending_tokens:
                request.append(0, frozenset())
                if request.finish_reason:
                    scheduler.remove(request)
    assert num_pieces <= 1.3 * num_steps <= 65


def test_decodes_without_room_for_prompts(v3: ModelSize) -> None:
    setting = setting_of(8, 8, num_speculative_tokens=3)
    assert prompts_of(v3, setting, 15, 100, 64).loads == (0, 15)
    full = prompts_of(v3, setting, 16, 100, 64)
    assert full.loads == (0,)
    assert "decodes leave no room for prompts in a step of 64 tokens" in full.section(100).lines
    many = replace(setting, num_gpus=16)
    assert prompts_of(v3, many, 30, 100, 64).loads == (0, 15), "each replica has its share"


def test_sizes_of_graphs(v3: ModelSize) -> None:
    """Tokens of decodes count. Attention that absorbs the piece makes the step one graph."""
    prompts = prompts_of(v3, setting_of(8, 1), 32, 65536, 10_000)
    pieces = (64, 65536, 0), (64, 65536, 32), (600, 0, 0), (1100, 0, 32)
    graphs = [str(prompts.step(*sizes).graph) for sizes in pieces]
    assert graphs == ["64 tokens, whole", "96 tokens, whole", "640 tokens, whole", "1280 tokens"]
    assert prompts.step(9000, 0, 0).graph is None
    assert prompts.step(10_000, 0, 32).new == 10_000 - 32


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_steps(family: str) -> None:
    model = read_model(tiny_config(family))
    costs = PrefillCosts(deployed(model, 2, 2), 64)
    assert 0 < costs.piece_us(8, 0) < costs.piece_us(8, 200) < costs.piece_us(64, 200)
    prompts = prompts_of(model, setting_of(2, 2), 4, 100, 256)
    (alone, beside), *_ = prompts.steps()
    assert alone.wait_us == 0 < beside.wait_us <= beside.step_us["total"]
    assert alone.step_us["total"] <= beside.step_us["total"]
    content: Any = json.loads(json.dumps(prompts.section(300).content))
    assert [way["num_steps"] for way in content["first_token"]] == [2, len(prompts.pieces(300, 4))]
