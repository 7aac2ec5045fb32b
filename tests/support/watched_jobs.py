"""Jobs of ranks under a watchdog, without a launcher, and faults of one rank."""

import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist

from dcpmla.job.watchdog import Reported, Watchdog
from dcpmla.parallel.collectives import PeerFault, named
from dcpmla.runtime.sampling import SamplingParams
from tests.support.hash_model import HashModel, make_engine
from tests.support.launchers import free_port
from tests.support.ranks import start_process

TIMEOUT = 3.0
MARGIN = 25.0  # seconds: the ranks' start, reads of the posts, the store's grace, and other load on the machine
STEP = 0.6  # longer than a beat: the posts name the step
Work = Callable[[int, Watchdog], object]


@dataclass(frozen=True)
class Ended:
    """The end of a job: the ranks' exit codes (-n by signal n), their stderr, and the seconds it took."""

    codes: list[int]
    text: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if "dcpmla: error: " in line]


def run(
    work: Work,
    num_ranks: int = 2,
    store_on_rank_0: bool = False,
    store_seconds: float = 60,
    stopped_seconds: float = 0,
) -> Ended:
    """Run work(rank, watchdog) on every rank, in processes without a launcher.

    Stopped ranks resume stopped_seconds after the others have ended or stopped. The store is rank 0's or, with
    store_seconds, that of a process which leaves after so long.
    """
    port = free_port()
    store = None if store_on_rank_0 else dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as directory:
        errors = Path(directory) / "errors"
        started = time.monotonic()
        processes = [
            start_process(_rank, (errors, rank, num_ranks, port, store is None, work)) for rank in range(num_ranks)
        ]
        try:
            while running := [process for process in processes if process.exitcode is None]:
                wait([process.sentinel for process in running], timeout=0.2)
                seconds = time.monotonic() - started
                assert seconds < 60, (
                    f"ranks {[processes.index(process) for process in running]} did not end: {errors.read_text()}"
                )
                if seconds > store_seconds:
                    store = None
                if all(is_stopped(process.pid) for process in running):
                    time.sleep(stopped_seconds)
                    for process in running:
                        os.kill(process.pid, signal.SIGCONT)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return Ended([process.exitcode for process in processes], errors.read_text(), seconds)


def is_stopped(pid: int) -> bool:
    return process_status(pid) == psutil.STATUS_STOPPED


def process_status(pid: int) -> str | None:
    """Return psutil's status, or None for a process that is gone: another thread may reap it at any time."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return None


def _rank(errors: Path, rank: int, num_ranks: int, port: int, store_on_rank_0: bool, work: Work) -> None:
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(errors.parent / "flight ")
    store = dist.TCPStore("localhost", port, num_ranks, is_master=store_on_rank_0 and rank == 0, wait_for_workers=False)
    try:
        with Watchdog(store, rank, num_ranks, TIMEOUT) as watchdog:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
            work(rank, watchdog)
            watchdog.enter("shutdown")
            dist.barrier()
    except Reported:
        sys.exit(2)


def step() -> None:
    with named("all-reduce of a step", dist.group.WORLD):
        dist.all_reduce(torch.ones(2))


def with_fault(fault: Callable[[list[int]], object], at: int, rank: int, watchdog: Watchdog) -> None:
    """Run three steps; in the last, rank `at` calls the fault with all ranks' pids while the others wait for it."""
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    for number in range(3):
        watchdog.enter(f"decode step {number}")
        if number == 2 and rank == at:
            time.sleep(STEP)
            fault(pids)
        step()


def oversleep(_: list[int]) -> None:
    time.sleep(60)


def sleep_with_the_interpreters_lock(_: list[int]) -> None:
    ctypes.PyDLL(None).sleep(60)


def allocate(_: list[int]) -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def fill_disk(_: list[int]) -> None:
    with open("/dev/full", "w") as file:
        file.write("x")


def bug(_: list[int]) -> None:
    raise KeyError("no such thing")


def mistake(_: list[int]) -> None:
    raise ValueError("option (--option) is 3;\n  choose 4")


def send(number: int, rank: int, pids: list[int]) -> None:
    """Send a signal to one rank, then sleep so that nothing else ends the job."""
    os.kill(pids[rank], number)
    time.sleep(60)


def terminate_all(pids: list[int]) -> None:
    """Ask all ranks to stop, as torchrun does that is asked to."""
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    time.sleep(60)


def terminate_and_die(pids: list[int]) -> None:
    """End as one that is killed, whereupon torchrun asks the other rank to stop."""
    os.kill(pids[0], signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGKILL)


def mix_up(_: list[int]) -> None:
    """Enter a collective that the others do not."""
    dist.barrier()


def leave_apart(rank: int, watchdog: Watchdog) -> None:
    watchdog.enter("last step")
    dist.barrier()
    if rank == 0:
        time.sleep(TIMEOUT / 2)


def take_turns_loading(rank: int, watchdog: Watchdog) -> None:
    """Let rank 1 take longer than the timeout, as it announced, so that the other rank waits for it."""
    watchdog.enter("loading", 30)
    time.sleep(rank * (TIMEOUT + 4))
    watchdog.enter("first step")
    step()


def load_while_one_is_lost(rank: int, watchdog: Watchdog) -> None:
    watchdog.enter("loading", 40)
    time.sleep(STEP)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(30)


def go_on(rank: int, watchdog: Watchdog) -> None:
    for number in range(8):
        watchdog.enter(f"decode step {number}")
        time.sleep(0.5)
        step()


def pause_in_a_step(rank: int, watchdog: Watchdog) -> None:
    """Take SIGTSTP in an operation that may take less time than the pause, and go on with it; rank 0 waits for rank 1
    then.
    """
    watchdog.enter("decode step 1", 2 * TIMEOUT)
    os.kill(os.getpid(), signal.SIGTSTP)
    for _ in range(rank * int(10 * (TIMEOUT + STEP))):
        time.sleep(0.1)  # a single sleep would end with the pause
    step()


BROKEN = (b"", b"\xff", b"[" * 9999, b"7", b"{}", b'{"beat": "late"}', b"[0, 1]", b'[0, 1, "2"]', b"[0, 999, 2]")


def kill_after_broken_values(rank: int, watchdog: Watchdog) -> None:
    """Kill rank 1, after it has written values into the watchdog's store that no rank of the job writes."""

    def write(pids: list[int]) -> None:
        store = dist.PrefixStore("watchdog", watchdog._job_store.clone())  # type: ignore[attr-defined]
        until = time.monotonic() + 2.0  # several beats, and a read of all posts
        while time.monotonic() < until:
            for value in BROKEN:
                for key in ("post/0", "post/1", "claim"):
                    store.set(key, value)
                time.sleep(0.02)
        send(signal.SIGKILL, 1, pids)

    with_fault(write, 1, rank, watchdog)


class SilentModel(HashModel):
    """A model in whose third step rank 1 sleeps without sending its part of an exchange; the others notice on the
    device.
    """

    def check(self) -> None:
        if len(self.steps) == 3:
            time.sleep(STEP)
            if dist.get_rank() == 1:
                oversleep([])
            raise PeerFault(
                f"combine failed on rank {dist.get_rank()} of the group [0, 1, 2]: nothing came from rank 1 for 1 s"
            )


def serve_with_one_silent(rank: int, watchdog: Watchdog) -> None:
    mesh = SimpleNamespace(tp_size=3, tp_rank=rank, dcp_size=1, dcp_rank=0, tp_group=dist.group.WORLD)
    engine = make_engine(num_blocks=5, model=SilentModel(), mesh=mesh)
    engine.on_step = lambda line: watchdog.enter(line, 30)  # the exchange gives up first
    engine.add([1, 2, 3], SamplingParams(ignore_eos=True))
    list(engine.run())
