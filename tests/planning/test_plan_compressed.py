"""Plans of DeepSeek-V4, and of V4.1, whose layers share entries: what their checkpoints weigh, what their caches take,
what a step reads.
"""

import json
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from dcpmla.__main__ import main
from dcpmla.attention.layers.compressed.cache import CompressedPlan
from dcpmla.config import DCPConfig
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.machine import H200X8
from dcpmla.planning.mixed import MixedSteps
from dcpmla.planning.prefill import PrefillCosts
from dcpmla.planning.recommend import make_plan
from dcpmla.planning.weights import ModelSize
from tests.support.deepseek_v41_files import save_v41
from tests.support.plan_cases import CONFIGS, deployed, read_published, setting_of


def read(name: str) -> ModelSize:
    """Read DeepSeek-V4-Flash or -Pro, or DeepSeek-V4.1-Flash."""
    return read_published(f"deepseek_{name}" if name.startswith("v") else f"deepseek_v4_{name}")


@pytest.mark.parametrize(
    ("name", "billions", "rel"), [("flash", 284, 0.02), ("pro", 1600, 0.02), ("v41_flash", 552, 9e-4)]
)
def test_parameters_are_as_published(name: str, billions: float, rel: float) -> None:
    sizes = [p.count * prod(p.shape) for p in read(name).parameters if ".engram." not in p.name]
    assert sum(sizes) / 1e9 == pytest.approx(billions, rel=rel)


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


def test_bytes_of_a_token_and_of_a_state_by_hand() -> None:
    flash = make_plan(deployed(read("flash"), 8, 8, "fp8_ds_mla", index_cache_dtype="fp8"), 1, 4096)
    rows, keys = 21 * 585 / 4 + 20 * 585 / 128, 21 * 132 / 4
    assert flash.kv_bytes_per_token == -(-(rows + keys) // 1)
    windows, sums = 43 * 128 * 585, 4 * 3 * (21 * 2 * (512 + 128) + 20 * 512)
    assert flash.bytes_per_state == windows + sums


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


def test_tables_are_cut_and_not_read() -> None:
    """A rank of eight has 25 GB of both tables, of which a step reads a few rows."""
    assert round(read("v41_flash").weight_bytes(8)["embedding"] / 1e9) == round(
        (768_022_850 * 264 / 8 + 2 * 129280 * 5120) / 1e9
    )


def test_bytes_of_shared_entries_by_hand() -> None:
    """Three caches of entries of two tokens, one of one; windows of 40 layers; an id of each token on each rank."""
    plan = make_plan(deployed(read("v41_flash"), 8, 8, "fp8_ds_mla", index_cache_dtype="fp8"), 1, 4096)
    assert plan.kv_bytes_per_token == -(-(3 / 2 + 1) * (585 + 132) // 1) + 8 * 4
    assert plan.bytes_per_state == 40 * 128 * 585 + 4 * 4 * 3 * 512
    plain = make_plan(deployed(read("v41_flash"), 8, 1), 1, 4096)
    assert plain.kv_bytes_per_token == (3 / 2 + 1) * 2 * (512 + 128) + 4


def test_a_step_reads_windows_and_shared_entries() -> None:
    """By two layers with windows alone; indexers and readers of entries of two tokens; the source of candidate blocks,
    readers and later indexers of entries of one.
    """
    reads = [layer.reads(1 << 20) for layer in read("v41_flash").attention.layers]
    counts = Counter((each.num_rows, each.num_keys) for each in reads)
    assert counts == {(128, 0): 2, (640, 1 << 19): 3, (640, 0): 30, (640, 1 << 20): 5}


@pytest.mark.parametrize("dcp_size", [1, 2])
def test_shared_entries_are_allocated_once(dcp_size: int, tmp_path: Path) -> None:
    save_v41(tmp_path)
    attention = read_model(load_config(tmp_path)).attention
    dcp = DCPConfig(tensor_parallel_size=2, decode_context_parallel_size=dcp_size, block_size=8)
    plan = attention.plan_cache(dcp, [200], torch.float32, num_states=64)
    assert isinstance(plan, CompressedPlan)
    cache = plan.allocate(torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in cache.tensors) == plan.bytes_per_rank
    assert cache[2].latents is cache[1].latents
    assert cache[5].index_keys is cache[3].index_keys
    assert plan.bytes_per_block == (8 // 2 + 8) * (16 + 16) * 4
