"""`doctor`: what it finds on one rank and on two, and that it tells a broken kernel and a broken exchange from right
ones.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.__main__ import main
from dcpmla.attention.backends import reference
from dcpmla.attention.backends.calls import DecodeCall, PrefillCall
from dcpmla.attention.backends.choice import DECODE_BACKENDS, PREFILL_BACKENDS, Backend
from dcpmla.bench.geometries import config_of
from dcpmla.cli import determinism, self_tests
from dcpmla.cli.doctor import CONFIG
from dcpmla.cli.self_tests import SelfTest
from dcpmla.comm.exchange import Exchange
from dcpmla.comm.nccl import AllGatherReduceScatter, AllToAll
from dcpmla.integrations.families.table import attention_of
from dcpmla.parallel import fixed
from tests.support.backends import only
from tests.support.launchers import run_forked, run_together, torchrun
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def test_the_attention_is_deepseek_v3_s() -> None:
    assert attention_of(config_of("deepseek-v3")).config == CONFIG


def test_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    command = [sys.executable, "-m", "dcpmla", "doctor", "-tp", "2", "--device", "cpu", "--json", out]
    (result,) = run_forked([(command, {})])
    content = json.loads(out.read_text())
    assert (content["ok"], content["dtype"]) == (True, "float32")
    assert [(facts["rank"], facts["device"], facts["decode"], facts["prefill"]) for facts in content["ranks"]] == [
        (0, "cpu", "torch", "torch"),
        (1, "cpu", "torch", "torch"),
    ]
    assert content["ranks"][1]["versions"]["torch"] == torch.__version__
    assert content["exchanges"] == {"auto": "a2a", "ag_rs": "ag_rs", "a2a": "a2a"}
    for test in content["self_tests"]:
        assert not test["failures"]
        assert 0 < test["largest_error"] < 1e-5  # float32 against float64 is never all equal
    assert [test["name"] for test in content["self_tests"]] == ["decode", "prefill", "exchange a2a", "exchange ag_rs"]
    found = [(row["exchange"], row["tokens"], row["heads"], row["in_graph"]) for row in content["latencies"]]
    assert found == [(backend, num_tokens, 16, False) for backend in ("a2a", "ag_rs") for num_tokens in (1, 32, 256)]
    assert all(row["median_us"] > 0 for row in content["latencies"])
    assert result.stdout.count("rank 1: cpu of ") == 1
    assert result.stdout.startswith("ranks: 2 ranks, 2 of them on this host, started by dcpmla, on CPUs\n")
    assert result.stdout.count("self-test of decode: ok") == 1  # said once, by the first rank
    assert result.stdout.endswith("all well: 4 self-tests passed on every rank\n")


def misses_last_key(call: DecodeCall) -> tuple[Tensor, Tensor]:
    return reference.mla_decode(call._replace(seq_lens=torch.where(call.seq_lens == 300, 299, call.seq_lens)))


def has_no_compiler(*_: object) -> tuple[Tensor, Tensor]:
    raise RuntimeError("Failed to find C compiler.\nset CC")


@pytest.mark.usefixtures("one_process_on_cpu")
def test_broken_kernels_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "doctor.json"
    decode = Backend[DecodeCall]("hasty", lambda _: "", misses_last_key)
    prefill = Backend[PrefillCall]("bare", lambda _: "", has_no_compiler)
    with only(DECODE_BACKENDS, decode), only(PREFILL_BACKENDS, prefill):
        assert main(["doctor", "--device", "cpu", "--json", str(out)]) == 1
    said = capsys.readouterr().out
    assert "kernels: decode hasty, prefill bare" in said
    assert "self-test of decode: FAILED: rank 0: out differs by " in said
    assert "self-test of prefill: FAILED: rank 0: RuntimeError: Failed to find C compiler.\n" in said
    assert said.endswith("FAILED: decode, prefill\n")
    content = json.loads(out.read_text())
    assert not content["ok"]
    assert [test["largest_error"] is None for test in content["self_tests"]] == [False, True]


class _Deaf(AllToAll):
    """Rank 1 takes its own shard for the whole, and lets an empty one's payload through."""

    def combine(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        merged, merged_lse = super().combine(out, lse)
        heads = slice(self.rank * merged.shape[1], (self.rank + 1) * merged.shape[1])
        return (merged, merged_lse) if self.rank != 1 else (out[:, heads], merged_lse)


class _Swapped(AllGatherReduceScatter):
    def gather_heads(self, q: Tensor) -> Tensor:
        return super().gather_heads(q).flip(1)


def judged(exchange: Exchange, dtype: torch.dtype) -> SelfTest:
    config, group = CONFIG, dist.group.WORLD
    assert group is not None
    return self_tests.judge("it", self_tests.ExchangeTest(exchange, group, config, CPU, dtype).errors(), dtype)


def check_exchanges() -> list[list[SelfTest]]:
    """Of the right ones, of those that are not."""
    group = dist.group.WORLD
    right = [
        judged(kind(group), dtype)
        for kind in (AllToAll, AllGatherReduceScatter)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return [right, [judged(kind(group), torch.float32) for kind in (_Deaf, _Swapped)]]


def test_broken_exchanges_are_told() -> None:
    ranks = run_ranks(2, check_exchanges)
    for right, _ in ranks:
        assert [outcome.failure for outcome in right] == ["", "", "", ""]
    deaf, swapped = zip(*(wrong for _, wrong in ranks), strict=True)
    assert [bool(outcome.failure) for outcome in deaf] == [False, True]
    assert "combine differs by inf" in deaf[1].failure
    assert deaf[1].largest_error is None
    assert all(outcome.failure.startswith("gather_heads differs by ") for outcome in swapped)


@pytest.mark.usefixtures("one_process_on_cpu")
def test_mistakes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none" / "doctor.json"
    words = "where no file can be written (No such file or directory); give a path in a writable directory"
    for option, value, message in (
        ("--json", path, f"\ndcpmla: error: --json is {path}, {words}\n"),
        ("--model", "elsewhere", "--model is elsewhere; it goes with --determinism"),
    ):
        assert main(["doctor", "--device", "cpu", option, str(value)]) == 2
        said = capfd.readouterr()
        assert said.out == ""
        assert message in said.err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    run_together([([sys.executable, "-m", "dcpmla", "doctor", "--device", "cuda", "--json", out], {})])
    content = json.loads(out.read_text())
    (facts,) = content["ranks"]
    assert (content["ok"], content["dtype"]) == (True, "bfloat16")
    assert facts["name"] == torch.cuda.get_device_name(0)
    assert facts["decode"] in ("hopper", "triton")
    assert {"nccl", "cuda", "cuda driver"} <= set(facts["versions"])
    assert len(facts["peers"]) == torch.cuda.device_count()
    assert [row[index] for index, row in enumerate(facts["peers"])] == ["-"] * len(facts["peers"])


@pytest.mark.gpu_2
def test_on_two_gpus(tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    run_together([(torchrun(["-m", "dcpmla", "doctor", "--device", "cuda", "--json", out], 2), {})])
    content = json.loads(out.read_text())
    exchanges = dict.fromkeys(content["exchanges"].values())
    assert {"a2a", "ag_rs"} <= exchanges.keys()  # direct follows where GPUs have NVLink
    names = ["decode", "prefill", *(f"exchange {name}" for name in exchanges)]
    assert [test["name"] for test in content["self_tests"]] == names
    assert all(row["in_graph"] and row["heads"] == 128 for row in content["latencies"])
    assert [facts["peers"] is None for facts in content["ranks"]] == [False, True]


@pytest.mark.usefixtures("one_process_on_cpu")
def test_determinism(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process. A line for each way with the number of equal rows; the exit code is 1 where one differs."""
    out = tmp_path / "doctor.json"
    monkeypatch.setattr(determinism, "CPU_PROMPT_LENS", (1, 5))
    monkeypatch.setattr(determinism, "WAYS", determinism.WAYS[:1])
    command = ["doctor", "--device", "cpu", "--determinism", "--json", str(out)]
    assert main(command) == 0
    content, lines = json.loads(out.read_text()), capfd.readouterr().out.splitlines()
    assert content["ok"]
    assert [test["name"] for test in content["self_tests"]][:2] == ["decode", "prefill"]
    assert (set(content["exchanges"].values()), content["latencies"]) == ({"none"}, [])
    assert "exchange: none (the cache is not sharded, nothing moves)" in lines
    assert lines[-1] == "all well: 4 self-tests passed on every rank"
    assert lines[-2] == "self-test of equal bits, dcp 1, exchange none, together: 16 of 16 rows of logits are equal"
    multiply = fixed.multiply_rows
    monkeypatch.setattr(fixed, "multiply_rows", lambda x, weight: multiply(x * (1 + (len(x) > 1) / 64), weight))
    assert main(command) == 1
    (last,) = json.loads(out.read_text())["self_tests"][-1:]
    assert last["failures"] == ["rank 0: 0 of 16 rows of logits are equal"]
