"""Plans of DeepSeek-V4: what its checkpoints weigh, what its caches take, what a step reads."""

import json
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dcpmla.__main__ import main
from dcpmla.attention.layers.compressed.cache import CompressedCache, CompressedPlan
from dcpmla.cache.states import num_states
from dcpmla.integrations.families.table import attention_of
from dcpmla.planning.capacity import block_of, capacity_table, largest_cache
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.machine import H200X8
from dcpmla.planning.mixed import MixedSteps
from dcpmla.planning.prefill import PrefillCosts
from dcpmla.planning.recommend import cache_bytes, make_plan
from dcpmla.planning.setting import Setting
from dcpmla.planning.weights import ModelSize
from tests.support.layouts import dcp_config
from tests.support.plan_cases import CONFIGS, deployed, read_published, setting_of

FORMATS = [(kv, index) for kv in ("bf16", "fp8_ds_mla") for index in ("auto", "fp8")]


def read(name: str) -> ModelSize:
    """Read DeepSeek-V4-Flash or -Pro."""
    return read_published(f"deepseek_v4_{name}")


def tiny_v4() -> Any:
    """Every kind of layer; rows that fp8_ds_mla holds."""
    sizes = {
        **{"vocab_size": 192, "hidden_size": 48, "moe_intermediate_size": 32, "num_hidden_layers": 4},
        **{"num_attention_heads": 8, "head_dim": 128, "qk_rope_head_dim": 64, "q_lora_rank": 24},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "o_groups": 4, "o_lora_rank": 16},
        **{"index_n_heads": 4, "index_head_dim": 64, "index_topk": 8, "sliding_window": 8, "hc_mult": 2},
        "compress_ratios": [0, 4, 128, 4],
        "num_hash_layers": 1,
    }
    return transformers.DeepseekV4Config(**sizes)


@pytest.mark.parametrize(("name", "billions"), [("flash", 284), ("pro", 1600)])
def test_parameters_are_as_published(name: str, billions: float) -> None:
    total = sum(parameter.count * prod(parameter.shape) for parameter in read(name).parameters)
    assert total / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(("name", "expected"), [("flash", 4096), ("pro", 8192)])
def test_states_within_prompts_cost_a_sixteenth_of_their_time(name: str, expected: int) -> None:
    """Of its time without another step for a state, which half as many tokens would exceed."""
    costs = PrefillCosts(deployed(read(name), 8, 8), 8192)
    steps, least = MixedSteps(costs, 0, 0), costs.least_state_tokens
    assert least == expected
    for size, pays in ((least, True), (least // 2, False)):
        added_us = steps.step_us(size, 0, size, is_one_graph=True)["total"] - costs.piece_us(size, 0)
        assert (16 * added_us < costs.piece_us(size, 0)) == pays


def test_the_command_prints_states_and_what_prompts_that_begin_alike_reuse(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = f"plan --model {CONFIGS / 'deepseek_v4_flash.json'} -tp 8 -dcp 2 --batch 8 --context 4096 --json"
    assert main([*command.split(), str(tmp_path / "plan.json")]) == 0
    printed = capfd.readouterr().out
    assert "with tp 8; a GB is one of each GPU, besides the states of 16 requests" in printed
    assert "cache  index cache  dcp  bytes a token  bytes a request  tokens a GB" in printed
    line = "reuse blocks of 512 tokens: the second a power of two blocks of at least 4,096 tokens, others all"
    assert line in printed
    reuse = json.loads((tmp_path / "plan.json").read_text())["prompts"]["reuse"]
    assert reuse == {"block_tokens": 512, "least_state_tokens": 4096}


def test_sharding_keeps_its_gain() -> None:
    """Entries and index keys are both sharded, so 8 ranks hold 8 times as much.

    Were index keys on every rank, fp8's 21 x 585 / 4 + 20 x 585 / 128 = 3,163 bytes of a token of Flash would be cut by
    8, and the 21 x 132 / 4 = 693 of its keys by 1: 8 x 3,856 / (3,163 + 8 x 693) = 3.5 times as much.
    """
    model, room = read("flash"), 40 * 10**9
    table = capacity_table(model.attention, room, 8, (1, 8), num_states=1)
    assert len(table) == 2 * len(FORMATS)
    for (kv, index), whole, shard in zip(FORMATS, table[::2], table[1::2], strict=True):
        assert shard.tokens_total >= 7.5 * whole.tokens_total > 0
        assert shard.bytes_per_rank <= room < replace(shard, num_blocks=shard.num_blocks + 1).bytes_per_rank
        setting = Setting(tp=8, dcp=8, kv_cache_dtype=kv, index_cache_dtype=index)
        plan, plain = (make_plan(Deployment(H200X8, model, s), 4, 65536) for s in (setting, replace(setting, dcp=1)))
        assert plan.kv_tokens_total >= 7.5 * plain.kv_tokens_total > 0
        assert plan.kv_bytes_per_token == plain.kv_bytes_per_token == shard.bytes_per_token
        assert plan.bytes_per_state == plain.bytes_per_state > 0


def test_bytes_of_a_token_and_of_a_state_by_hand() -> None:
    flash = make_plan(deployed(read("flash"), 8, 8, "fp8_ds_mla", index_cache_dtype="fp8"), 1, 4096)
    rows, keys = 21 * 585 / 4 + 20 * 585 / 128, 21 * 132 / 4
    assert flash.kv_bytes_per_token == -(-(rows + keys) // 1)
    windows, sums = 43 * 128 * 585, 4 * 3 * (21 * 2 * (512 + 128) + 20 * 512)
    assert flash.bytes_per_state == windows + sums


@pytest.mark.parametrize(("kv_cache_dtype", "index_cache_dtype"), FORMATS)
@pytest.mark.parametrize("dcp", [1, 4])
def test_bytes_are_what_the_cache_allocates(kv_cache_dtype: str, index_cache_dtype: str, dcp: int) -> None:
    layout = dcp_config(4, dcp, kv_cache_dtype=kv_cache_dtype, index_cache_dtype=index_cache_dtype)
    block = block_of(attention_of(tiny_v4()), layout, 5)
    plan = largest_cache(block, 10**6)
    assert isinstance(plan, CompressedPlan)
    allocated = CompressedCache(plan, torch.device("cpu"))
    num_bytes = sum(tensor.nbytes for tensor in allocated.tensors)
    assert num_bytes == plan.bytes_per_rank <= 10**6 < num_bytes + plan.bytes_per_block
    # What plans tell users, in a cache in which a page or two do not count.
    large = replace(plan, num_blocks=1 << 16)
    told = large.num_blocks * large.bytes_per_block + large.num_states * large.bytes_per_state
    assert told == pytest.approx(large.bytes_per_rank, rel=1e-3)


def test_what_fits_is_what_the_cache_takes() -> None:
    model = read("pro")
    for dcp, batch, context in ((1, 3, 100_000), (8, 40, 500_000), (4, 1, 1_000_000)):
        setting = Setting(tp=8, dcp=dcp, kv_cache_dtype="fp8_ds_mla")
        plan = make_plan(Deployment(H200X8, model, setting), batch, context)
        room = cache_bytes(H200X8, plan.weight_bytes_per_rank)

        def fits(num_requests: int, seq_len: int, setting: Setting = setting, room: int = room) -> bool:
            block = block_of(model.attention, setting.dcp_config, num_states(num_requests))
            num_blocks = num_requests * -(-seq_len // block.block_tokens)
            return replace(block, num_blocks=num_blocks).bytes_per_rank <= room

        assert plan.fits == fits(batch, context)
        assert fits(plan.max_num_seqs, context)
        assert not fits(plan.max_num_seqs + 1, context)
        assert fits(batch, plan.longest_context)
        assert not fits(batch, plan.longest_context + 1)


def test_a_step_reads_windows_and_entries() -> None:
    """Of CSA at most topk entries, of HCA all of them; keys of CSA where there are more than topk."""
    attention = read("flash").attention
    for context, csa, keys, hca in ((100, 25, 0, 0), (2048, 512, 0, 16), (1 << 20, 512, 1 << 18, 1 << 13)):
        window = min(context, 128)
        rows = Counter((reads.num_rows, reads.num_keys) for reads in (x.reads(context) for x in attention.layers))
        expected = ((window, 0), 2), ((window + csa, keys), 21), ((window + hca, 0), 20)
        assert rows == sum((Counter({key: number}) for key, number in expected), Counter())


def test_sharding_shortens_reads_and_adds_an_exchange() -> None:
    plain, sharded = (deployed(read("pro"), 8, dcp).step_us(64, 1 << 20) for dcp in (1, 8))
    for part in ("selection", "attention"):
        assert sharded[part] < plain[part]
    for part in ("gather", "combine"):
        assert sharded[part] > plain[part] == 0
    for part in ("projections", "rest"):
        assert sharded[part] == plain[part]


def test_a_hyper_connection_takes_a_product() -> None:
    """Its weights are read once, and four streams three times."""
    machine, setting = H200X8, setting_of(8, 1)
    model = read("flash")
    others = tuple(parameter for parameter in model.parameters if not parameter.is_hyper_connection)
    for batch in (1, 64):
        with_them, without = (
            Deployment(machine, replace(model, parameters=parameters), setting).step_us(batch, 1024)["rest"]
            for parameters in (model.parameters, others)
        )
        num_bytes = 24 * 4 * 4096 * 4 / machine.product_read_share + 3 * batch * 4 * 4096 * 2
        expected = 2 * 43 * (machine.product_us + num_bytes / machine.hbm_gb_per_s / 1e3)
        assert with_them - without == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-tp", "3"], "it must divide the 8 groups of the model's 64 attention heads: choose 1, 2, 4 or 8"),
        (["--kv-cache-dtype", "fp8"], "fp8 does not go with DeepSeek-V4's attention; choose auto, bf16 or fp8_ds_mla"),
        (["-dcp", "3"], "must divide tensor_parallel_size (-tp) 8"),
    ],
)
def test_mistakes_are_one_line(options: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(CONFIGS / "deepseek_v4_flash.json"), *options]) == 2
    captured = capfd.readouterr()
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.out == ""
