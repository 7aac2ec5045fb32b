"""The benchmark of prefill and decode servers: with a server that only counts, and with real ones on CPUs."""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks import disaggregation, server_processes
from benchmarks.disaggregation import Prompts
from benchmarks.http_load import Answer, describe_lost
from benchmarks.load import Load, summarize
from dcpmla.bench.results import unknown_fields

URL, TOKEN_BYTES, TRANSFER_SECONDS = "http://server", 1000, 0.25
TINY = "--geometry tiny --layers 2 --experts 8 --device cpu --max-num-batched-tokens 256 --commit abc"
SIZES = "--context 96 --repeats 1 --decodes 2 --decode-context 16 --decode-len 60 --input-len 80"
RATE = "--request-rate 10 --seconds 0.3 --delay 0.1"


@dataclass
class FakeServer:
    """A server that counts transfers, if it has any, in place of the functions that speak HTTP.

    Attributes:
        bodies: Bodies of the requests so far.
    """

    has_transfers: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_bytes: int = 0

    def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        if body.get("kv_transfer_params", {}).get("do_remote_decode"):
            return {"kv_transfer_params": {"do_remote_prefill": True, "remote_request_id": len(self.bodies)}}
        self.num_bytes += TOKEN_BYTES * len(body["prompt"]) * self.has_transfers
        return {}

    def drive(self, url: str, load: Load, api_key: str | None, fields: Mapping[str, Any]) -> list[Answer]:
        for prompt in load.prompts:
            self.post(url, {"prompt": prompt, **fields})
        return [Answer(time, time + 2.0) for time in load.arrival_times]

    def read_metric(self, url: str, name: str) -> float:
        num_transfers = sum("remote_request_id" in body.get("kv_transfer_params", {}) for body in self.bodies)
        return self.num_bytes if name == disaggregation.BYTES else num_transfers * TRANSFER_SECONDS


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake = FakeServer()
    for name in ("post", "drive", "read_metric"):
        monkeypatch.setattr(disaggregation, name, getattr(fake, name))
    return fake


def test_a_transfer_goes_through_both_servers(server: FakeServer) -> None:
    """The prompt is prefilled first; the answer's parameters go to the server that decodes, with the same prompt."""
    row = disaggregation.transfer_row(URL, URL, Prompts(100), 50, 2)
    num_bytes = 50 * TOKEN_BYTES  # of one of the two prompts, and so is the time
    expected = {"operation": "transfer", "bytes_read": num_bytes, "seconds": TRANSFER_SECONDS}
    assert row == {"tokens": 50, **expected, "gb_per_s": pytest.approx(num_bytes / TRANSFER_SECONDS / 1e9, abs=1e-3)}
    first, second, third, fourth = server.bodies
    assert first["kv_transfer_params"] == {"do_remote_decode": True}
    assert second["kv_transfer_params"] == {"do_remote_prefill": True, "remote_request_id": 1}
    assert first["prompt"] == second["prompt"] != third["prompt"] == fourth["prompt"]
    server.has_transfers = False
    with pytest.raises(RuntimeError, match="counts 0 bytes"):
        disaggregation.transfer_row(URL, URL, Prompts(100), 50, 1)


def test_the_warm_up_waits_for_a_transfer(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    disaggregation.warm_up(URL, Prompts(100), 8, has_transfers=True)
    assert len(server.bodies) == 4
    server.has_transfers, server.num_bytes = False, 0
    disaggregation.warm_up(URL, Prompts(100), 8, has_transfers=False)
    monkeypatch.setattr(disaggregation, "CONNECT_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match=r"no transfer in 0\.2 s"):
        disaggregation.warm_up(URL, Prompts(100), 8, has_transfers=True)


def test_servers_have_gpus_of_their_own() -> None:
    args = argparse.Namespace(prefill_tp=2, decode_tp=1, device="cuda", max_num_batched_tokens=64)
    prefill, decode = disaggregation.servers_of(args, "split", Path("model"), 1000)
    (both,) = disaggregation.servers_of(args, "both", Path("model"), 1000)
    assert [[*server.devices] for server in (prefill, decode, both)] == [[0, 1], [2], [0, 1, 2]]
    assert [server.options[server.options.index("-dcp") + 1] for server in (prefill, decode, both)] == [2, 1, 3]
    assert prefill.url in decode.options


def test_first_tokens(server: FakeServer) -> None:
    row = disaggregation.first_token_row(URL, Prompts(100), 30, 3)
    assert row["time_to_first_token_mean"] == 2.0
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 3
    assert disaggregation.first_token_fields([Answer(1.0, 3.0), Answer(0.0)])["time_to_first_token_p50"] == 2.0


def test_gaps_of_a_window() -> None:
    """Tokens that come as one have no time between them."""
    assert disaggregation.gaps_between([0.0, 1.0, 3.0, 3.0, 7.0, 8.0], 1.0, 7.5) == [1.0, 2.0, 0.0, 4.0]
    assert disaggregation.gaps_between([], 0.0, 1.0) == []


def test_a_server_that_ends_shows_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(server: server_processes.ServerProcess, log: Any) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-c", "print('no such model')"], stdout=log)

    monkeypatch.setattr(server_processes.ServerProcess, "start", start)
    server = server_processes.ServerProcess([0], [])
    with (
        pytest.raises(RuntimeError, match="is not healthy:\nno such model"),
        server_processes.running([server]),
    ):
        pass


def test_summaries() -> None:
    assert summarize([*range(101)]) == {"mean": 50, "p50": 50, "p90": 90, "p99": 99}
    assert summarize([3.0]) == {"mean": 3, "p50": 3, "p90": 3, "p99": 3}
    assert summarize([]) == {"mean": None, "p50": None, "p90": None, "p99": None}


def test_lost_requests_are_described_in_a_line() -> None:
    assert describe_lost([Answer(0.0), Answer(1.0)]) == ""
    errors = [*["status 429: {\n  busy\n}"] * 3, "a", "b", "b", "c"]
    answers = [Answer(0.0, error=error) for error in errors] + [Answer(0.0)]
    assert describe_lost(answers) == "7 of 8 are lost: 3 x status 429: { busy }; 2 x b; 1 x a"


@pytest.mark.thorough
def test_real_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "disaggregation.json"
    command = f"disaggregation.py {TINY} {SIZES} {RATE} --json {out}"
    monkeypatch.setattr(sys, "argv", command.split())
    disaggregation.main()
    content = json.loads(out.read_text())
    rows = content["rows"]
    assert (content["commit"], content["machine"]) == ("abc", "2 x CPU")
    assert [row.get("operation") for row in rows] == ["transfer", "copy", None, None, None, None]
    assert [row["servers"] for row in rows] == ["prefill and decode"] * 4 + ["both"] * 2
    assert not unknown_fields(rows)
    assert all(row["seconds"] > 0 for row in rows if "operation" in row)
    assert rows[-2]["time_to_first_token_mean"] > 0
    assert (rows[-1]["decodes"], rows[-1]["context"], rows[-1]["output_len"]) == (2, 16, 60)
