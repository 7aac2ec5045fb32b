"""Several hosts, as network namespaces joined by a virtual cable: their ranks give the tokens of one process."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.launchers import (
    GENERATE,
    MEET,
    MPIRUN,
    ROOT,
    Host,
    environment,
    free_port,
    mpirun,
    read_lines,
    run_forked,
    run_program,
    run_together,
    srun,
)
from tests.support.ranks import start_process

IN_NAMESPACE = ROOT / "tests" / "support" / "in_namespace.py"

needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="mpirun and mpi4py of extra `mpi` are not installed")


@pytest.fixture(scope="module")
def one_process(model: Path) -> list[list[int]]:
    run_forked([([sys.executable, *GENERATE, *options(model, model / "out.json")], {})])
    return read_tokens(model / "out.json")


def options(model: Path, out: Path, num_ranks: int = 1) -> list[object]:
    prompts = ["--prompt-ids", "5,6,7", "--prompt-ids", ",".join(map(str, range(1, 60)))]
    sizes = ["-tp", num_ranks, "-dcp", num_ranks, "--cp-kv-cache-interleave-size", 2, "--block-size", 8]
    return ["--model", model, *prompts, "--max-new-tokens", 6, "--device", "cpu", "--json", out, *sizes]


def read_tokens(file: Path) -> list[list[int]]:
    return [output["token_ids"] for output in json.loads(file.read_text())["outputs"]]


def test_the_hosts_are_two(hosts: tuple[Host, Host]) -> None:
    """A port of one host is reachable from the other only by the host's address."""
    listen = "import socket; s = socket.create_server(('', 29400)); s.settimeout(30); print(s.accept()[1][0])"
    connect = (
        "import socket, sys, time\n"
        "def connects(host): return socket.socket().connect_ex((host, 29400)) == 0\n"
        "while not connects(sys.argv[1]): time.sleep(0.1)\n"
        "print(connects('localhost'))"
    )
    programs = ["-c", listen], ["-c", connect, hosts[0].address]
    results = run_together(
        [host.command([sys.executable, *program], {}) for host, program in zip(hosts, programs, strict=True)],
        timeout=60,
    )
    assert [result.stdout.strip() for result in results] == [hosts[1].address, "False"]


def test_torchrun(hosts: tuple[Host, Host], model: Path, one_process: list[list[int]], tmp_path: Path) -> None:
    """Host names do not tell these hosts apart, so the agents are given addresses."""
    out = tmp_path / "out.json"
    argv = [ROOT / "launch" / "torchrun_nodes.sh", *options(model, out, 2)]
    shared = {"NODES": "2", "RANKS": "1", "HEAD": hosts[0].address, "PYTHON": sys.executable}
    run_together([host.command(argv, {**shared, "LOCAL_ADDR": host.address}) for host in hosts])
    assert read_tokens(out) == one_process


def test_one_command(hosts: tuple[Host, Host], model: Path, one_process: list[list[int]], tmp_path: Path) -> None:
    """The second host starts first, and reaches the store at the first one's address."""
    out = tmp_path / "out.json"
    argv = [sys.executable, *GENERATE, *options(model, out, 4), "--nnodes", 2, "--master-addr", hosts[0].address]
    run_together([hosts[node].command([*argv, "--node-rank", node], {}) for node in (1, 0)])
    assert read_tokens(out) == one_process


def test_srun(hosts: tuple[Host, Host], model: Path, one_process: list[list[int]], tmp_path: Path) -> None:
    """Each node's tasks run in its namespace; the node list does not resolve here, so MASTER_ADDR gives the host."""
    out = tmp_path / "out.json"
    tasks = srun([*GENERATE, *options(model, out, 4)], [2, 2], "n[1-2]", MASTER_ADDR=hosts[0].address)
    commands = []
    for (python, *program), env in tasks:
        host = hosts[int(env["SLURM_NODEID"])]
        commands.append(([python, IN_NAMESPACE, host.name, *program], host.command([], env)[1]))
    run_forked(commands)
    assert read_tokens(out) == one_process


@needs_mpirun
def test_mpirun(hosts: tuple[Host, Host], model: Path, one_process: list[list[int]], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    argv = [ROOT / "launch" / "mpirun.sh", *options(model, out, 2)]
    variables = {"HOSTS": ",".join(host.address for host in hosts), "RANKS": "1", "PYTHON": sys.executable}
    run_together([hosts[0].command(argv, {**variables, **hydra(hosts, tmp_path)})])
    assert read_tokens(out) == one_process


@needs_mpirun
def test_mpirun_knows_who_shares_a_host(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    argv = mpirun(MEET, 4, "-hosts", ",".join(host.address for host in hosts), "-ppn", 2)
    lines = read_lines(run_together([hosts[0].command(argv, hydra(hosts, tmp_path))]))
    assert [(line["rank"], line["local_rank"], line["sum"]) for line in lines] == [
        (0, 0, 1111),
        (1, 1, 1111),
        (2, 0, 1111),
        (3, 1, 1111),
    ]
    assert {line["origin"] for line in lines} == {"4 ranks, 2 of them on this host, started by mpirun, on CPUs"}


def hydra(hosts: tuple[Host, Host], directory: Path) -> dict[str, str]:
    """Start ranks with mpirun, which reaches the hosts by a stand-in for ssh; they meet on a free port of one."""
    shell = directory / "ssh"
    cases = "\n".join(f"{host.address}) namespace={host.name} ;;" for host in hosts)
    skip_options = 'while [ "${1#-}" != "$1" ]; do shift; done'
    shell.write_text(
        f'#!/bin/sh\n{skip_options}\ncase "$1" in\n{cases}\nesac\nshift\nexec ip netns exec "$namespace" sh -c "$*"\n'
    )
    shell.chmod(0o755)
    return {
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(shell),
        "HYDRA_IFACE": "cable",
        "MASTER_ADDR": hosts[0].address,
    }


CLIENT = """
import json, sys, time
from urllib.request import Request, urlopen

url, prompt = sys.argv[1:]
until = time.monotonic() + 120
while True:
    try:
        urlopen(url + "/health").close()
        break
    except OSError:
        assert time.monotonic() < until
        time.sleep(0.2)
body = {"prompt": list(map(int, prompt.split(","))), "max_tokens": 6, "temperature": 0, "logprobs": 0}
with urlopen(Request(url + "/v1/completions", json.dumps(body).encode())) as answer:
    print(json.load(answer)["usage"]["completion_tokens"])
"""


def test_a_server_over_two_hosts(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """The first rank's host answers a client on the other one; asked to stop, all ranks end well."""
    port, address = free_port(), hosts[0].address
    own = ["--host", address, "--port", port, "--device", "cpu", "-tp", 2, "-dcp", 2, "--block-size", 8]
    program = ["-m", "dcpmla", "serve", "--model", ROOT / "examples" / "needle" / "model", *own]
    ranks = []
    for (_, *words), env in srun(program, [1, 1], "n[1-2]", MASTER_ADDR=address):
        host = hosts[int(env["SLURM_NODEID"])]
        variables = {**environment(), **host.command([], env)[1]}
        paths = [tmp_path / f"{name} {host.name}" for name in ("out", "err")]
        ranks.append(start_process(run_program, ([*map(str, (IN_NAMESPACE, host.name, *words))], variables, *paths)))
    try:
        client = [sys.executable, "-c", CLIENT, f"http://{address}:{port}", "5,6,7"]
        (ended,) = run_together([hosts[1].command(client, {})])
        assert ended.stdout.strip() == "6"
        ranks[0].terminate()
        for rank in ranks:
            rank.join(60)
        assert [rank.exitcode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
