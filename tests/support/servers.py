"""Servers for tests: `dcpmla serve` on forked ranks, and what clients see of it."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from tests.support.launchers import ROOT, environment, free_port, run_program, unattended
from tests.support.ranks import start_process

NEEDLE = ROOT / "examples" / "needle" / "model"
KEY = "sesame"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
MAX_MODEL_LEN = 2048  # The shared server has this limit; the needle model has 8192.
QUESTION = "amber-ant 123; amber-apple 456; amber-ant?"  # the model answers 123 123 123 ...
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('no such role') }}{% endif %}{{ m.content }}{% endfor %}{{ suffix | default('') }}"
)


def needle_with_template(directory: Path) -> Path:
    """Copy the needle model, and give its tokenizer a chat template that writes the contents one after the other."""
    model = directory / "needle"
    shutil.copytree(NEEDLE, model)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return model


@dataclass
class RunningServer:
    """A server and its ranks' processes, in rank order."""

    url: str
    processes: list[Any]
    logs: list[Path]

    def metric(self, name: str) -> float:
        """Return the sum of a metric's values. A name with labels selects among them, and may have no value."""
        lines = httpx2.get(f"{self.url}/metrics", headers=AUTHORIZED).text.splitlines()
        starts = f"dcpmla_{name}" if "{" in name else (f"dcpmla_{name} ", f"dcpmla_{name}{{")
        values = [float(line.split()[-1]) for line in lines if line.startswith(starts)]
        assert values or "{" in name, name
        return sum(values)

    def stop(self, rank: int = 0) -> None:
        """Tell a rank to stop."""
        os.kill(self.processes[rank].pid, signal.SIGTERM)

    def exit_codes(self) -> list[int | None]:
        """Wait for the ranks to end."""
        until = time.monotonic() + 60
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def log(self) -> str:
        """Return what all ranks printed."""
        return "".join(path.read_text() for path in self.logs)


@contextmanager
def serve(
    directory: Path, model: Path, num_ranks: int, *options: object, port: int | None = None, **more: str
) -> Iterator[RunningServer]:
    """Serve a model on ranks of CPUs that share one cache; yield once it is healthy. No process is left running.

    Args:
        port: Port to listen on; None for one that is free.
        more: Variables of all ranks.
    """
    port = port or free_port()
    sizes = ["-tp", num_ranks, "-dcp", num_ranks, "--device", "cpu", "--block-size", 16, "--port", port]
    program = ["-m", "dcpmla", "serve", "--model", model, *sizes, "--kv-cache-memory-bytes", 4 << 20, *options]
    processes, logs = [], []
    for rank, (argv, env) in enumerate(unattended(program, num_ranks)):
        paths = [directory / f"{name} {port} {rank}" for name in ("out", "err")]
        logs += paths
        processes.append(start_process(run_program, ([*map(str, argv[1:])], {**environment(), **env, **more}, *paths)))
    server = RunningServer(f"http://127.0.0.1:{port}", processes, logs)
    try:
        wait_until_healthy(server.url, 90, lambda: all(process.is_alive() for process in processes), server.log)
        yield server
    finally:
        for process in processes:
            process.kill()
            process.join()


def wait_until_healthy(url: str, timeout: float, is_alive: Any = lambda: True, log: Any = str) -> float:
    """Wait until /health is 200, and return how many seconds that took."""
    started = time.monotonic()
    while time.monotonic() < started + timeout and is_alive():
        try:
            if httpx2.get(f"{url}/health", timeout=5).status_code == 200:
                return time.monotonic() - started
        except httpx2.HTTPError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"the server is not healthy:\n{log()[-3000:]}")


def read_events(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return the objects of a stream of events, which must end as OpenAI's do."""
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    return [json.loads(text) for text in events[:-1]]
