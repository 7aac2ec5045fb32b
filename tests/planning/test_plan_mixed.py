"""Predicted steps with pieces of prompts: sums of their parts, measured times, and the steps that the engine makes."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dcpmla.bench.geometries import config_of
from dcpmla.cache.blocks import BlockAllocator
from dcpmla.cli.plan_prompts import PromptPlan
from dcpmla.integrations.model_size import read_model
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.machine import H200X8, Machine, change_machine
from dcpmla.planning.mixed import MixedSteps
from dcpmla.planning.prefill import PrefillCosts, kernel_rates, token_us
from dcpmla.planning.recommend import make_plan
from dcpmla.planning.setting import Setting
from dcpmla.planning.weights import ModelSize
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.scheduler import Scheduler
from tests.support.models import FAMILIES, tiny_config
from tests.support.plan_cases import FP8, RESULTS, deployed, read_glm5, read_v3, read_v32, setting_of, within

# An H100 reads 93 % of the published rate, as an H200 does.
H100 = change_machine(H200X8, {"memory_bytes": 80 << 30, "hbm_gb_per_s": 3350 * 4460 / 4800}, "h100")
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
