"""Servers as processes of their own, and requests to their other routes."""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import IO, Any
from urllib.error import URLError
from urllib.request import Request, urlopen

API_KEY = secrets.token_hex(8)
_START_SECONDS = 600.0
_STOP_SECONDS = 60.0
_LOG_CHARS = 4000  # characters of a log that are shown when a server ends


def free_port() -> int:
    """Return a port of this host that is free."""
    with socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@dataclass
class ServerProcess:
    """A server to start: `dcpmla serve` on some GPUs of this host.

    Attributes:
        devices: Indices of its GPUs, a rank each; on CPUs only their number counts.
        options: Options of `serve`.
    """

    devices: Sequence[int]
    options: Sequence[object]
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        """Return its address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """Start the ranks under torchrun, in a process group of their own."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        gpus = [visible[index] if len(visible) > index and visible[index] else str(index) for index in self.devices]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", len(gpus)]
        command = [sys.executable, *launcher, "-m", "dcpmla", "serve", "--port", self.port, *self.options]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "DCPMLA_API_KEY": API_KEY}
        return subprocess.Popen(
            [*map(str, command)], stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


@contextmanager
def running(servers: Sequence[ServerProcess]) -> Iterator[None]:
    """Start servers at the same time, and stop them at the end.

    Raises:
        RuntimeError: A server ends early or is not healthy in time; the message has the end of its log.
    """
    with ExitStack() as stack:
        started = []
        for server in servers:
            log = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".log"))
            process = server.start(log)
            stack.callback(_stop, process)
            started.append((server, process, Path(log.name)))
        for server, process, path in started:
            until = time.monotonic() + _START_SECONDS
            while not _is_healthy(server.url):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{server.url} is not healthy:\n{path.read_text()[-_LOG_CHARS:]}")
                time.sleep(0.2)
        yield


def _is_healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5):
            return True
    except (URLError, OSError):
        return False


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask a server to end; end all its processes if it does not."""
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_metric(url: str, name: str) -> float:
    """Return the value of a metric of a server, summed over its labels; 0 if it has none."""
    with urlopen(_request(f"{url}/metrics")) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.partition(" ")[0].partition("{")[0] == name)


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a completion request that is not streamed, and return the answer.

    Raises:
        urllib.error.HTTPError: A status that is not 200.
    """
    with urlopen(_request(f"{url}/v1/completions", body)) as answer:
        content: dict[str, Any] = json.load(answer)
        return content


def _request(url: str, body: dict[str, Any] | None = None) -> Request:
    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
    return Request(url, None if body is None else json.dumps(body).encode(), headers)
