"""Modelled times of prompts' pieces: sums over parameters and tokens, a measured step, the bound of a mixed step."""

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
from dcpmla.config import MLAConfig
from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.model_files import load_config
from dcpmla.llm import LLM
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.machine import H200X8
from dcpmla.planning.prefill import PrefillCosts, kernel_rates, token_us
from dcpmla.planning.weights import ModelSize
from dcpmla.runtime.costs import piece_tokens
from tests.support.plan_cases import CONFIGS, deployed, read_glm5, read_v3, read_v4, read_v32, setting_of

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
    room_us = share * costs.max_prefill_us
    new = piece_tokens(costs, context, limit, room_us)
    assert 1 <= new <= limit
    assert new <= 64 or share == 1 or costs.piece_us(new, context) <= room_us
    first = piece_tokens(costs, context, limit, costs.max_prefill_us)
    assert new <= first <= limit


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
