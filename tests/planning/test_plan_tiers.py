"""Tiers of the cache: their contents, times of loads, and the choice between loading and prefilling."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.__main__ import main
from dcpmla.integrations.model_size import read_model
from dcpmla.integrations.offloading import make_host_memory
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.load import TierCosts
from dcpmla.planning.machine import H200X8
from dcpmla.planning.prefill import PrefillCosts
from dcpmla.planning.recommend import Plan, make_plan
from dcpmla.planning.tiers import load_costs, make_tiers, shortest_load
from dcpmla.planning.weights import ModelSize
from dcpmla.runtime.costs import TOKEN_COSTS, LoadCosts
from tests.support.models import FAMILIES, tiny_config
from tests.support.plan_cases import deployed, read_published, read_v3, write

ROW = 61 * 576 * 2  # bytes of a token in DeepSeek-V3's layers, in bfloat16
CPU = torch.device("cpu")
LAUNCHES_US = 61 * 10


def plan_of(model: ModelSize, tp: int = 8, dcp: int = 8, context: int = 4096, num_gpus: int | None = None) -> Plan:
    return make_plan(deployed(model, tp, dcp, num_gpus=num_gpus), 1, context)


@cache
def costs_of(dcp: int, tier: str = "host") -> TierCosts:
    """Return the costs of DeepSeek-V3's loads on 8 ranks."""
    return load_costs(PrefillCosts(Deployment(H200X8, read_v3(), plan_of(read_v3(), dcp=dcp)), 8192))[tier]


@pytest.mark.parametrize("dcp", [1, 2, 8])
@pytest.mark.parametrize("num_gpus", [None, 16])
def test_ranks_share_the_host_memory_and_dcp_ranks_the_tokens(dcp: int, num_gpus: int | None, v3: ModelSize) -> None:
    """Each of 8 ranks has an eighth of 512 GiB. 8 / dcp groups hold the same tokens."""
    gpu, host, disk = make_tiers(H200X8, v3, plan_of(v3, 8, dcp, 100_000, num_gpus), 100_000, 512, 2000.5)
    assert [tier.name for tier in (gpu, host, disk)] == ["GPU", "host", "disk"]
    assert (host.bytes_per_rank, disk.bytes_per_rank) == (64 << 30, 2001 * (1 << 27) - (1 << 26))
    num_blocks = (64 << 30) // (64 * ROW)
    assert host.num_tokens == num_blocks * 64 * dcp
    assert host.num_requests == num_blocks // -(-100_000 // (64 * dcp))
    assert gpu.num_tokens == plan_of(v3, 8, dcp).kv_tokens_total
    assert gpu.num_requests == gpu.num_tokens // (64 * dcp) // -(-100_000 // (64 * dcp))
    assert len(make_tiers(H200X8, v3, plan_of(v3, 8, dcp, 100_000), 100_000, 512)) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_load_has_the_bytes_of_the_cache(family: str) -> None:
    """A whole cache with one state, which the engine allocates, is as large as a load of all its tokens."""
    model = read_model(tiny_config(family))
    plan = plan_of(model, 1, 1, 128)
    block = Deployment(H200X8, model, plan).block()
    cache = replace(block, num_blocks=64, num_states=min(1, block.num_states))
    num_bytes = sum(tensor.nbytes for tensor in cache.allocate(CPU).tensors)
    costs = load_costs(PrefillCosts(Deployment(H200X8, model, plan), 8192))["host"]
    loaded = costs.load_bytes(cache.tokens_total)
    assert cache.tokens_total == 64 * block.block_tokens
    assert 0.9 * num_bytes <= loaded <= num_bytes  # pages of small blocks are padded


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v4_flash", "kimi_k3", "glm5_next"])
def test_host_memory_holds_as_many_tokens_as_the_engine_makes_room_for(name: str) -> None:
    """The engine rounds the bytes of a layer's block up to pages."""
    model = read_v3() if name == "deepseek_v3" else read_published(name)
    plan = plan_of(model, 8, 8, 1000)
    block = Deployment(H200X8, model, plan).block()
    host = make_tiers(H200X8, model, plan, 1000, 4)[1]
    _, tier = make_host_memory(replace(block, num_states=min(1, block.num_states)).allocate(CPU), 4, 8, 1)
    assert host.bytes_per_rank == 1 << 29
    assert 1 <= host.num_tokens / (tier.blocks.num_slots * block.block_tokens) < 1.05
    num_requests = host.num_tokens // (-(-1000 // block.block_tokens) * block.block_tokens)
    assert bool(tier.states.num_slots) == (block.bytes_per_state > 0)
    assert host.num_requests == min(num_requests, tier.states.num_slots or num_requests)


@pytest.mark.parametrize("dcp", [1, 4, 8])
def test_each_rank_loads_its_part_over_its_own_link(dcp: int) -> None:
    """The last block counts whole. Disks are read before the copy to the GPU."""
    num_bytes = -(-100_000 // (64 * dcp)) * 64 * ROW
    host, disk = (costs_of(dcp, tier) for tier in ("host", "disk"))
    assert host.load_bytes(100_000) == num_bytes
    assert host.load_us(100_000) == pytest.approx(LAUNCHES_US + num_bytes / 50e3)
    assert disk.load_us(100_000) == pytest.approx(LAUNCHES_US + num_bytes / 50e3 + num_bytes / 5e3)


@given(dcp=st.sampled_from([1, 8]), num_tokens=st.integers(1, 1 << 20), context=st.integers(0, 1 << 20))
def test_the_cheaper_way_is_chosen(dcp: int, num_tokens: int, context: int) -> None:
    pieces, costs = PrefillCosts(deployed(read_v3(), 8, dcp), 8192), costs_of(dcp)
    num_bytes = -(-num_tokens // (64 * dcp)) * 64 * ROW
    is_cheaper = LAUNCHES_US + num_bytes / 50e3 < pieces.piece_us(num_tokens, context)
    assert costs.should_load(num_tokens, context) == is_cheaper


def test_a_tiny_model_prefills_what_a_slow_link_would_load() -> None:
    """Launches of a load take longer than the products of a few tokens. By default, everything is loaded."""
    model = read_model(tiny_config("deepseek_v3"))
    plan = plan_of(model, 1, 1, 128)
    slow = load_costs(PrefillCosts(Deployment(replace(H200X8, host_gb_per_s=1e-3), model, plan), 8192))["host"]
    assert not slow.should_load(64, 0)
    default: LoadCosts = TOKEN_COSTS
    assert default.should_load(1, 0)
    fast = costs_of(8)
    assert fast.should_load(512, 0)
    assert fast.should_load(512, 100_000)


def test_the_shortest_load(v3: ModelSize) -> None:
    """Longer contexts are loaded as well, shorter ones are not; from disks it takes more tokens."""
    host, disk = (shortest_load(costs_of(1, tier)) for tier in ("host", "disk"))
    assert host is not None
    assert disk is not None
    assert 1 <= host < disk
    costs = costs_of(1, "disk")
    assert not costs.should_load(disk - 1, 0)
    assert all(costs.should_load(disk * 2**power, 0) for power in range(12))
    plan = plan_of(v3)
    slowest = load_costs(PrefillCosts(Deployment(replace(H200X8, disk_gb_per_s=1e-6), v3, plan), 8192))["disk"]
    assert shortest_load(slowest) is None


def test_command_prints_tiers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, out = write(tmp_path / "config.json", tiny_config("deepseek_v3").to_dict()), tmp_path / "plan.json"
    command = f"plan --model {config} -tp 8 -dcp 8 --context 200 --batch 2 --kv-offloading-size 0.5 --json {out}"
    assert main([*command.split(), "--kv-offloading-disk-size", "4"]) == 0
    content, printed = json.loads(out.read_text())["tiers"], capfd.readouterr().out
    gpu, host, disk = content["tiers"]
    assert (gpu["name"], host["bytes_per_rank"], disk["bytes_per_rank"]) == ("GPU", 1 << 26, 1 << 29)
    assert [load["num_tokens"] for load in content["loads"]] == [200, 32_768, 131_072, 524_288]
    assert all(load["load_us"]["host"] < load["load_us"]["disk"] for load in content["loads"])
    assert re.search(r"^tier +GiB a rank +tokens +requests of 200\n( *(GPU|host|disk) .*\n){3}", printed, re.MULTILINE)
    assert re.search(
        r"^ *tokens +fits into .* prefill / disk\n( *[\d,]+ +(GPU|host|disk|no tier).*\n){4}", printed, re.M
    )
    for source, name in (("host memory", "host"), ("disks", "disk")):
        assert f"loading from {source} is faster from {content['loads_from'][name]:,} tokens on" in printed


def test_command_without_tiers_and_rate_prints_neither(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, out = write(tmp_path / "config.json", tiny_config("deepseek_v3").to_dict()), tmp_path / "plan.json"
    assert main(["plan", "--model", config, "-tp", "8", "--context", "200", "--json", str(out)]) == 0
    content, printed = json.loads(out.read_text()), capfd.readouterr().out
    for name, title in (("tiers", "tiers of the cache"), ("split", "prefill and decode servers")):
        assert content[name] is None
        assert title not in printed
