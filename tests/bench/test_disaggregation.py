"""The benchmark of prefill and decode servers: against a server that only counts, and with real ones on CPUs."""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks import disaggregation, server_processes
from benchmarks.disaggregation import Prompts
from benchmarks.http_load import Answer
from dcpmla.bench.results import unknown_fields
from tests.support.launchers import environment, run_program, unattended
from tests.support.ranks import start_process

KEY = server_processes.API_KEY
TOKEN_BYTES, TRANSFER_SECONDS, STEP_SECONDS = 1000, 0.25, 0.002
TINY = "--geometry tiny --layers 2 --experts 8 --device cpu --max-num-batched-tokens 256 --commit abc"
SIZES = "--context 96 --repeats 1 --decodes 2 --decode-context 16 --decode-len 60 --input-len 80"
RATE = "--request-rate 10 --seconds 0.3 --delay 0.1"


@dataclass
class FakeServer:
    """A server that prefills nothing and decodes tokens that are all 7; it counts transfers if it has any.

    Attributes:
        bodies: Bodies of the requests so far.
    """

    has_transfers: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_transfers: int = 0
    num_bytes: int = 0

    def metrics(self) -> str:
        """Return two metrics and another one."""
        counted = f'dcpmla_kv_transfer_bytes_total{{direction="received"}} {float(self.num_bytes)}\n'
        counted += 'dcpmla_kv_transfer_bytes_total{direction="sent"} 0.0\n'
        counted += f"dcpmla_kv_transfer_seconds_total {self.num_transfers * TRANSFER_SECONDS}\n"
        return f"# TYPE dcpmla_kv_transfer_bytes_total counter\n{counted}dcpmla_kv_transfer_bytes_total_other 5.0\n"

    def take(self, body: dict[str, Any]) -> dict[str, Any]:
        """Count a request, and return the fields that its answer has beyond the usual ones."""
        self.bodies.append(body)
        params = body.get("kv_transfer_params", {})
        if params.get("do_remote_decode"):
            return {"kv_transfer_params": {"do_remote_prefill": True, "remote_request_id": len(self.bodies)}}
        if self.has_transfers:
            self.num_transfers += 1
            self.num_bytes += TOKEN_BYTES * len(body["prompt"])
        return {}


@pytest.fixture
def fake() -> Iterator[tuple[str, FakeServer]]:
    server = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            assert self.path == "/health" or self.headers["Authorization"] == f"Bearer {KEY}"
            self.answer(server.metrics().encode() if self.path == "/metrics" else b"")

        def do_POST(self) -> None:
            assert (self.path, self.headers["Authorization"]) == ("/v1/completions", f"Bearer {KEY}")
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            extra = server.take(body)
            if not body.get("stream"):
                self.answer(json.dumps({"choices": [{"text": ""}], **extra}).encode())
                return
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            for number in range(body["max_tokens"]):
                time.sleep(STEP_SECONDS)
                self.event({"choices": [{"index": 0, "text": "", "token_ids": [7]}], "usage": None})
                if number == 1:  # two tokens that come as one
                    self.event({"choices": [{"index": 0, "text": "", "token_ids": [7, 7]}], "usage": None})
            self.event({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
            self.close_connection = True

        def event(self, content: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

        def answer(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{listener.server_address[1]}", server
    listener.shutdown()
    thread.join()
    listener.server_close()


def test_a_transfer_goes_through_both_servers(fake: tuple[str, FakeServer]) -> None:
    """The prompt is prefilled first; the answer's parameters go to the server that decodes, with the same prompt."""
    url, server = fake
    row = disaggregation.transfer_row(url, url, Prompts(100), 50, 2)
    num_bytes = 2 * 50 * TOKEN_BYTES
    expected = {"operation": "transfer", "bytes_read": num_bytes, "seconds": 0.5, "gb_per_s": num_bytes / 0.5 / 1e9}
    assert row == {"tokens": 50, **expected, "gb_per_s": pytest.approx(num_bytes / 0.5 / 1e9, abs=1e-3)}
    first, second, third, fourth = server.bodies
    assert first["kv_transfer_params"] == {"do_remote_decode": True}
    assert second["kv_transfer_params"] == {"do_remote_prefill": True, "remote_request_id": 1}
    assert first["prompt"] == second["prompt"] != third["prompt"] == fourth["prompt"]
    server.has_transfers = False
    with pytest.raises(RuntimeError, match="counts 0 bytes"):
        disaggregation.transfer_row(url, url, Prompts(100), 50, 1)


def test_the_warm_up_waits_for_a_transfer(fake: tuple[str, FakeServer], monkeypatch: pytest.MonkeyPatch) -> None:
    url, server = fake
    disaggregation.warm_up(url, Prompts(100), 8, has_transfers=True)
    assert len(server.bodies) == 4
    server.has_transfers, server.num_bytes = False, 0
    disaggregation.warm_up(url, Prompts(100), 8, has_transfers=False)
    monkeypatch.setattr(disaggregation, "CONNECT_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match="no transfer in 0.2 s"):
        disaggregation.warm_up(url, Prompts(100), 8, has_transfers=True)


def test_decodes_beside_prompts(fake: tuple[str, FakeServer]) -> None:
    url, server = fake
    sizes = {"decodes": 2, "decode_context": 16, "decode_len": 200, "input_len": 32}
    args = argparse.Namespace(**sizes, request_rate=20.0, seconds=0.2, delay=0.05)
    row = disaggregation.decodes_row(args, url, Prompts(100))
    assert not unknown_fields([row])
    assert sorted(len(body["prompt"]) for body in server.bodies) == [16] * 2 + [32] * 4
    assert all(body["return_token_ids"] for body in server.bodies)
    assert (row["decodes"], row["context"], row["output_len"]) == (2, 16, 200)


def test_gaps_of_a_window() -> None:
    """Tokens that come as one have no time between them."""
    assert disaggregation.gaps_between([0.0, 1.0, 3.0, 3.0, 7.0, 8.0], 1.0, 7.5) == [1.0, 2.0, 0.0, 4.0]
    assert disaggregation.gaps_between([], 0.0, 1.0) == []


def test_first_tokens(fake: tuple[str, FakeServer]) -> None:
    url, server = fake
    row = disaggregation.first_token_row(url, Prompts(100), 30, 3)
    assert row["time_to_first_token_mean"] >= STEP_SECONDS
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 3
    answers = [Answer(1.0, 3.0), Answer(0.0)]
    assert disaggregation.first_token_fields(answers)["time_to_first_token_p50"] == 2.0


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


class ForkedServer:
    """A server of one rank, forked from a process that has done the imports."""

    def __init__(self, server: server_processes.ServerProcess, log: Any) -> None:
        program = ["-m", "dcpmla", "serve", "--port", server.port, *server.options]
        [(command, variables)] = unattended(program, 1)
        variables = {**environment(), **variables, "CUDA_VISIBLE_DEVICES": "", "DCPMLA_API_KEY": KEY}
        arguments = [*map(str, command[1:])]
        self._process = start_process(run_program, (arguments, variables, log.name, log.name))

    def poll(self) -> int | None:
        exit_code: int | None = self._process.exitcode
        return exit_code

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, seconds: float) -> None:
        self._process.join(seconds)
        self._process.kill()
        self._process.join()


def test_real_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launch = server_processes.ServerProcess.start

    def start(server: server_processes.ServerProcess, log: Any) -> Any:
        return ForkedServer(server, log) if len(server.devices) == 1 else launch(server, log)

    monkeypatch.setattr(server_processes.ServerProcess, "start", start)
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
    assert rows[-1]["decodes"] == 2
