"""Ranks that meet or fail to: a port that is taken, some that cannot work together, some with unequal arguments."""

import socket
import sys
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcpmla.job.bootstrap import check_equal_arguments
from dcpmla.job.launcher import find_launch_info
from dcpmla.job.mpi import _own_name
from dcpmla.job.rendezvous import listen_for_ranks, meet
from tests.support.launchers import MEET, read_lines, run_forked, srun, unattended
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_port_that_is_taken(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 names the port and what to set, at once."""
    (_, env), _ = unattended([], 2) if launcher == "torchrun" else srun([], [2], "localhost")
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        words = (
            rf"^rank 0 of 2 \(started by {launcher}\) cannot listen at port {port} of its host: address already in use "
            r"\(EADDRINUSE\); set MASTER_PORT \(torchrun: --master-port\) to a free port, the same for all ranks$"
        )
        with pytest.raises(ConnectionError, match=words):
            meet(find_launch_info(env, timedelta(seconds=60)), timedelta(seconds=60))


def test_ranks_that_cannot_work_together() -> None:
    """Both say so rather than wait for each other."""
    first, (argv, env) = srun(MEET, [2], "localhost")
    results = run_forked([first, ([*argv, "__version__=1.0"], env)], check=False, timeout=60)
    words = f"ValueError: torch's version differs between ranks: {torch.__version__} on rank 0, 1.0 on rank 1"
    assert all(words in result.stderr for result in results)


def test_one_process_needs_no_launcher() -> None:
    (line,) = read_lines(run_forked([([sys.executable, *MEET], {})]))
    assert (line["origin"], line["sum"], line["neighbour"]) == ("one process, started by no launcher, on CPUs", 1.0, 0)


def check_arguments(cases: list[tuple[list[dict[str, Any]], str]]) -> None:
    for arguments, message in cases:
        if not message:
            check_equal_arguments(arguments[dist.get_rank()])
            continue
        with pytest.raises(ValueError, match="differs between ranks") as error:
            check_equal_arguments(arguments[dist.get_rank()])
        assert str(error.value).startswith(message), str(error.value)


def test_equal_arguments() -> None:
    same = {"-tp": 4, "--dtype": "auto", "--json": None}
    long = {"prompt": "x" * 500}
    cases = [
        ([same, dict(same), dict(same)], ""),
        (
            [same, same, {**same, "-tp": 2}],
            "-tp differs between ranks: 4 on rank 0, 2 on rank 2; start all ranks with the same",
        ),
        (
            [same, {**same, "--dtype": "float32"}, {**same, "-tp": 2}],
            "--dtype differs between ranks: 'auto' on rank 0, 'float32' on rank 1",
        ),
        ([{}, {"--seed": 1}, {}], "--seed differs between ranks: missing on rank 0, 1 on rank 1"),
        ([{"--seed": 1}, {"--seed": 1}, {}], "--seed differs between ranks: 1 on rank 0, missing on rank 2"),
        (
            [long, long, {"prompt": "x" * 300 + "y" * 200}],
            f"prompt differs between ranks: ...{'x' * 60}... on rank 0, ...{'x' * 30}{'y' * 30}...",
        ),
    ]
    run_ranks(3, check_arguments, cases)


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        (_own_name(alone=True), {"127.0.0.1"}),
        ("127.0.0.2", {"127.0.0.2"}),
        ("localhost", {"::", "0.0.0.0"}),
        ("192.0.2.1", {"::", "0.0.0.0"}),  # of no host: a router may translate it
    ],
)
def test_the_address_that_the_store_listens_at(host: str, addresses: set[str]) -> None:
    """Under mpirun: the one that other ranks are given, if it is one."""
    with closing(listen_for_ranks(host)) as listener:
        address, port, *_ = listener.getsockname()
        assert address in addresses
        with socket.create_connection((host if address == host else "127.0.0.1", port), timeout=10):
            pass
