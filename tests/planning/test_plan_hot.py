"""Plans with latents in host memory: bytes of engines' caches, rows fetched by a count of random selections."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dcpmla.__main__ import main
from dcpmla.config import DCPConfig
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.hot import fetch_bytes, hot_memory, hot_step, needed_hit_rate
from dcpmla.planning.machine import H200X8
from dcpmla.planning.setting import Setting
from dcpmla.planning.weights import ModelSize
from tests.support.plan_cases import FP8, read_glm5, read_v32

HOT = 262144


def deployed(model: ModelSize, dcp: int, **options: Any) -> Deployment:
    formats = {"kv_cache_dtype": "fp8_ds_mla", "index_cache_dtype": "fp8"}
    return Deployment(H200X8, model, Setting(tp=8, dcp=dcp, **formats, kv_hot_tokens=HOT, **options))


@pytest.mark.parametrize("dcp", [1, 8])
def test_bytes_are_the_cache_s(dcp: int) -> None:
    """Published sizes: 61 layers of latents of 656 bytes, keys of 132, and 4 bytes for where a latent is."""
    memory = hot_memory(deployed(read_v32(), dcp), 10**6, 100)
    assert memory.gpu_bytes_per_token == 61 * (132 + 4)
    assert memory.host_bytes_per_token == 61 * 656
    assert memory.host_tokens == 100 * 2**30 // 8 // (61 * 656 * 64) * 64 * dcp
    layout = DCPConfig(
        tensor_parallel_size=8,
        decode_context_parallel_size=dcp,
        kv_cache_dtype="fp8_ds_mla",
        index_cache_dtype="fp8",
        kv_hot_tokens=HOT,
    )
    plan = read_v32().attention.plan_cache(layout, [10**5], torch.bfloat16)
    assert plan.bytes_per_rank == plan.num_blocks * plan.bytes_per_block + memory.hot_bytes_per_rank
    num_rows = HOT // dcp
    num_scratch = max(0, max(199, num_rows // 2048) * 2048 - num_rows)
    of_sets = 61 * (num_rows * (656 + 4 + 8) + 32) + num_scratch * 656
    assert memory.hot_bytes_per_rank == of_sets


@pytest.mark.parametrize("dcp", [1, 2, 8])
def test_the_slowest_rank_fetches_as_many_rows_as_counted(dcp: int) -> None:
    """The mean over draws of the rank with most misses in a layer."""
    batch, rate = 32, 0.1
    generator = torch.Generator().manual_seed(0)
    num_missed = int(batch * 2048 * rate)
    owners = torch.randint(dcp, (300, num_missed), generator=generator)
    counted = torch.stack([(owners == rank).sum(1) for rank in range(dcp)]).amax(0).double().mean()
    predicted = fetch_bytes(deployed(read_v32(), dcp), batch, 131072, rate) / (61 * 656)
    assert predicted == pytest.approx(float(counted), rel=0.01)


def test_fetches_of_layers_that_share_selections() -> None:
    """GLM-5's layers all fetch; drafts select, too; short contexts have fewer rows than topk."""
    glm = fetch_bytes(deployed(read_glm5(), 1), 1, 131072, 1.0)
    assert glm == read_glm5().attention.num_layers * 2048 * 656
    assert fetch_bytes(deployed(read_glm5(), 1, num_speculative_tokens=3), 1, 131072, 1.0) == 4 * glm
    assert fetch_bytes(deployed(read_glm5(), 1), 1, 1024, 1.0) == glm / 2


def test_the_needed_hit_rate_balances_a_step() -> None:
    deployment = deployed(read_v32(), 1)
    rest = deployment.step_us(64, 131072)["total"]
    needed = needed_hit_rate(deployment, 64, 131072)
    assert 0 < needed < 1
    step = hot_step(deployment, 64, 131072, 1 - needed)
    assert step.fetch_us == pytest.approx(rest, rel=1e-3)
    assert step.step_us == pytest.approx(2 * rest, rel=1e-3)
    assert needed_hit_rate(deployed(read_v32(), 8), 1, 131072) == 0


def run_plan(directory: Path, *options: str) -> int:
    transformers.DeepseekV32Config(dtype="bfloat16", quantization_config=FP8).save_pretrained(directory / "model")
    arguments = [
        "plan",
        str(directory / "model"),
        "-tp",
        "8",
        "-dcp",
        "8",
        "--kv-cache-dtype",
        "fp8_ds_mla",
        "--batch",
        "4",
    ]
    return main([*arguments, "--index-cache-dtype", "fp8", "--json", str(directory / "plan.json"), *options])


def read_plan(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "plan.json").read_text())
    return content


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(tmp_path) == 0
    without = read_plan(tmp_path)
    assert run_plan(tmp_path, "--kv-hot-tokens", str(HOT), "--kv-offloading-size", "1500") == 0
    found = read_plan(tmp_path)
    assert without["hot"] is None
    assert found["tiers"] is None
    memory, steps = found["hot"]["memory"], found["hot"]["steps"]
    assert memory["gpu_bytes_per_token"] == found["settings"][0]["kv_bytes_per_token"] == 8296
    assert without["settings"][0]["kv_bytes_per_token"] == 48068
    assert memory["gpu_tokens"] > 4 * without["settings"][0]["kv_tokens_total"]
    assert steps == sorted(steps, key=lambda step: step["step_us"])
    assert "262,144 hot tokens a layer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--kv-hot-tokens 4096", r"is 4096, so all latents are in host memory; give .*--kv-offloading-size"),
        ("--kv-hot-tokens 2047 --kv-offloading-size 9", "it must be at least 2048"),
        ("--kv-hot-tokens 4096 --kv-offloading-size 9 --kv-offloading-disk-size 9", "blocks reach no disk"),
    ],
)
def test_refusals(options: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(tmp_path, *options.split()) != 0
    assert re.search(words, capsys.readouterr().err)
