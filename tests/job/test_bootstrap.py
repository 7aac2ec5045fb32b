"""Devices that ranks get, and jobs that torchrun, mpirun and srun really start."""

import os
import socket
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcpmla.job.bootstrap import assign_device, process_groups, read_launcher
from dcpmla.job.launcher import find_launch_info
from tests.job.test_launcher import SOON, TORCHRUN, env_of
from tests.support.launchers import (
    GENERATE,
    MEET,
    MPIRUN,
    ROOT,
    mpirun,
    read_lines,
    run_forked,
    run_together,
    srun,
    torchrun,
)

needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="mpirun and mpi4py of extra `mpi` are not installed")


@pytest.mark.parametrize(
    ("asked", "num_gpus", "expected"),
    [("auto", 8, "cuda:1"), ("auto", 0, "cpu"), ("cpu", 8, "cpu"), ("cuda", 4, "cuda:1")],
)
def test_all_ranks_of_a_host_take_the_same_kind_of_device(
    asked: str, num_gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_VISIBLE_DEVICES, which transformers reads, agrees with the device."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    for name, value in {**TORCHRUN, "CUDA_VISIBLE_DEVICES": "all"}.items():
        monkeypatch.setenv(name, value)
    ranks = read_launcher(asked)
    assert (ranks.rank, ranks.num_ranks, str(ranks.device)) == (5, 8, expected)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if expected == "cpu" else "all")
    devices = "CPUs" if expected == "cpu" else "GPUs"
    assert ranks.origin == f"8 ranks, 4 of them on this host, started by torchrun, on {devices}"


@pytest.mark.parametrize(("asked", "num_gpus"), [("cuda", 0), ("cuda", 3), ("auto", 1), ("auto", 3)])
def test_too_few_gpus(asked: str, num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank silently falls back to the CPU, also where each is shown one GPU of its own."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    words = f"'{asked}', but a rank sees {num_gpus} GPUs for 4 ranks of its host"
    hints = {"torchrun": "CUDA_VISIBLE_DEVICES", "srun SLURM_STEP_TASKS_PER_NODE=3,4": "no --gpus-per-task"}
    for env, hint in hints.items():
        with pytest.raises(ValueError, match=f"{words}.*{hint}"):
            assign_device(asked, find_launch_info(env_of(env), SOON))


def check_met(lines: list[dict[str, Any]], local_ranks: list[int], launcher: str) -> None:
    """Check that all ranks are there with their numbers."""
    size = len(local_ranks)
    assert [line["rank"] for line in lines] == list(range(size))
    assert [line["local_rank"] for line in lines] == local_ranks
    assert all(line["sum"] == sum(10.0**rank for rank in range(size)) for line in lines)
    assert [line["neighbour"] for line in lines] == [(rank + 1) % size for rank in range(size)]
    for line in lines:
        here = f"{line['num_local_ranks']} of them on this host"
        assert line["origin"] == f"{size} ranks, {here}, started by {launcher}, on CPUs"


def test_torchrun() -> None:
    """Its agent keeps the store when it starts the ranks again."""
    agent = torchrun(MEET, 2, "--standalone", "--max-restarts", 1, "--monitor-interval", 0.2)
    lines = read_lines(run_together([(agent, {"TORCH_FR_BUFFER_SIZE": "7", "FAILS": "1"})]))
    check_met(lines, [0, 1], "torchrun")
    # The user's setting is kept, the rest is turned on.
    kept = {"TORCH_FR_BUFFER_SIZE": "7", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert all(kept.items() <= line["environment"].items() for line in lines)


def test_srun() -> None:
    """Two tasks on one node and one on another meet on a port derived from the job."""
    lines = read_lines(run_forked(srun(MEET, [2, 1], "localhost,elsewhere")))
    check_met(lines, [0, 1, 0], "srun")
    assert [line["num_local_ranks"] for line in lines] == [2, 2, 1]


def test_slurm_script(tmp_path: Path) -> None:
    """The script hands its arguments to srun; a prompt with spaces stays one argument."""
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$OMP_NUM_THREADS" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": "/repository"}
    (result,) = run_together([(["bash", ROOT / "launch" / "slurm.sbatch", "--prompt", "two words"], env)])
    python = "/repository/.venv/bin/python"
    assert result.stdout.splitlines() == ["1", "--kill-on-bad-exit=1", python, *GENERATE, "--prompt", "two words"]


@needs_mpirun
def test_mpirun() -> None:
    check_met(read_lines(run_together([(mpirun(MEET, 2), {})])), [0, 1], "mpirun")


@needs_mpirun
def test_mpirun_ends_ranks_that_wait_in_mpi() -> None:
    """The second rank ends before it starts MPI, which mpirun tolerates."""
    imports = "from datetime import timedelta; from dcpmla.job.bootstrap import read_launcher"
    wait = f"{imports}; read_launcher('cpu', timedelta(seconds=2))"
    (result,) = run_together(
        [([*mpirun(["-c", wait], 1), ":", "-n", 1, sys.executable, "-c", "raise SystemExit(2)"], {})], check=False
    )
    assert "dcpmla: error: rank 0 (started by mpirun) did not meet the others within 2 s" in result.stderr


BROKEN = [*GENERATE, "--model", "/no/such/model", "--prompt-ids", "5", "--device", "cpu", "-tp", "2"]


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),  # before the ranks meet
        (["-tp", "4"], "tensor_parallel_size (-tp) is 4, but 2 ranks were started"),
        (["--device", "cuda"], "device (--device) is 'cuda', but a rank sees 0 GPUs for 2 ranks of its host"),
    ],
)
def test_a_mistake_of_one_rank_is_the_jobs(theirs: list[str], words: str) -> None:
    first, (argv, env) = srun(BROKEN, [2], "localhost", CUDA_VISIBLE_DEVICES="")
    results = run_forked([first, ([*argv, *theirs], env)], check=False, timeout=60)
    assert [result.returncode for result in results] == [2, 2]
    text = "".join(result.stderr for result in results)
    assert text.count("dcpmla: error: ") == 1
    assert f"dcpmla: error: rank 1: {words}" in text


@pytest.mark.parametrize("fault", ["silent", "no.such.host"])
def test_a_first_rank_that_is_none(fault: str) -> None:
    with socket.create_server(("localhost", 0)) as listener:  # which never speaks
        port, started = str(listener.getsockname()[1]), time.monotonic()
        env, words = {"MASTER_PORT": port}, f"localhost:{port} is not rank 0, or is stopped: set another MASTER_PORT"
        if fault != "silent":
            env, words = {"MASTER_ADDR": fault}, f"the host name '{fault}' does not resolve here"
        (result,) = run_forked([srun([*BROKEN, "--timeout", 1], [2], "localhost", **env)[1]], check=False, timeout=60)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert time.monotonic() - started < 30


def test_a_launch_is_read_as_often_as_one_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process groups leave no variable that another launcher would set."""
    alone = "srun SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=1"
    for name, value in env_of(alone).items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        ranks = read_launcher("cpu")
        with process_groups(ranks, dist.HashStore(), SOON):
            assert (ranks.rank, ranks.num_ranks, ranks.launcher) == (0, 1, "srun")


def test_groups_end_after_what_an_error_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would wait for a decode graph of a call that has failed."""

    class Graph:
        pass

    graphs: list[weakref.ref[Graph]] = []

    def load() -> None:
        graph = Graph()
        graphs.append(weakref.ref(graph))
        raise ValueError("no room")

    destroy = dist.destroy_process_group
    held: list[bool] = []

    def destroy_groups() -> None:
        held.append(graphs[0]() is not None)
        destroy()

    monkeypatch.setattr(dist, "destroy_process_group", destroy_groups)
    with pytest.raises(ValueError, match="no room"), process_groups(read_launcher("cpu"), dist.HashStore(), SOON):
        load()
    assert held == [False]
