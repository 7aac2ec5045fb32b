"""The watchdog in real processes over gloo: ranks that die, hang or fail, and the one line that follows."""

import faulthandler
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from dcpmla.job import watchdog
from dcpmla.job.board import Board
from dcpmla.job.faults import Post
from dcpmla.job.flight_record import write_flight_record
from dcpmla.job.watchdog import Reported, Watchdog
from tests.support import watched_jobs as work
from tests.support.watched_jobs import MARGIN, TIMEOUT, Ended, run, send, with_fault

MISSING = (
    r"rank 1 is missing, last seen \d+ s ago in decode step 2, at watched_jobs.py:\d+ \(\w+\); "
    "its process or host is gone"
)
ASLEEP = (
    r"(been in|not come back from) decode step 2 for \d+ s, at watched_jobs.py:\d+ \(oversleep\); see what holds it"
)
NO_STORE = "the job's store does not answer: who holds it on the first host, the launcher or rank 0, is gone or stopped"
KILL, STOP, STEP_2 = partial(send, signal.SIGKILL), partial(send, signal.SIGSTOP), "in decode step 2"
AGAIN = "run the same command again"


class Case(NamedTuple):
    """A job: what happens in the third step of a rank, the ranks' exit codes and what the line says."""

    fault: Callable[[list[int]], object]
    at: int
    codes: list[int]
    line: str
    store_on_rank_0: bool = False

    def run(self) -> Ended:
        return run(partial(with_fault, self.fault, self.at), len(self.codes), self.store_on_rank_0)


FAULTS = {
    "killed": Case(partial(KILL, 1), 1, [1, -9], f"rank 0 lost .* {STEP_2}: {MISSING}"),
    "killed of three": Case(partial(KILL, 1), 1, [1, -9, 1], rf"rank [02] lost .* {STEP_2}: {MISSING}"),
    "killed with the store": Case(
        partial(KILL, 0),
        0,
        [-9, 1],
        rf"rank 1 lost the others \(all-reduce of a step failed on rank 1.*\) {STEP_2}: {NO_STORE}",
        store_on_rank_0=True,
    ),
    "stopped": Case(partial(STOP, 1), 1, [1, 1], rf"rank 0 waited \d+ s {STEP_2}: {MISSING}"),
    "stopped with the store": Case(partial(STOP, 0), 0, [1, 1], rf"rank 1 waited \d+ s {STEP_2}: {NO_STORE}", True),
    "asleep": Case(work.oversleep, 1, [1, 1, 1], rf"(rank [02] waited .*: )?rank 1 has {ASLEEP}"),
    "asleep with the store": Case(work.oversleep, 0, [1, 1], rf"(rank 1 waited .*: )?rank 0 has {ASLEEP}", True),
    "holding the interpreter's lock": Case(
        work.sleep_with_the_interpreters_lock, 1, [1, 1], rf"rank 0 waited \d+ s {STEP_2}: {MISSING}"
    ),
    "out of memory": Case(
        work.allocate,
        1,
        [1, 1, 1],
        rf"rank 1 ran out of memory \(.*can't allocate memory.*\) {STEP_2}: lower --max-num-batched-tokens",
    ),
    "full disk": Case(
        work.fill_disk, 1, [1, 1], rf"rank 1 could not write \(No space left on device\) {STEP_2}: make room"
    ),
    "bug": Case(work.bug, 1, [1, 1, 1], rf"rank 1 failed \(KeyError: 'no such thing'\) {STEP_2}: a bug"),
    "mistake": Case(work.mistake, 1, [2, 2, 2], r"option \(--option\) is 3; choose 4$"),
    "terminated in a collective": Case(
        partial(send, signal.SIGTERM, 0), 1, [143, 143], rf"rank 0 was asked to stop \(SIGTERM\) {STEP_2}: {AGAIN}"
    ),
    "all terminated": Case(
        work.terminate_all, 1, [143, 143], rf"rank [01] was asked to stop \(SIGTERM\) {STEP_2}: {AGAIN}"
    ),
    "terminated after a death": Case(
        work.terminate_and_die, 1, [143, -9], rf"rank 0 was asked to stop \(SIGTERM\) {STEP_2}: {MISSING}"
    ),
    "interrupted": Case(
        partial(send, signal.SIGINT, 1), 1, [130] * 3, rf"rank 1 was asked to stop \(SIGINT\) {STEP_2}: {AGAIN}"
    ),
    "other collectives": Case(
        work.mix_up,
        1,
        [1, 1],
        rf"rank [01] (waited .* {STEP_2}: rank [01] {STEP_2} at .*\((step|mix_up)\)|lost the others)",
    ),
}
JOBS: dict[str, tuple[Callable[[], Ended], list[int], str]] = {
    **{name: (case.run, case.codes, case.line) for name, case in FAULTS.items()},
    "killed after broken values": (
        partial(run, work.kill_after_broken_values),
        [1, -9],
        f"rank 0 lost .* {STEP_2}: rank 1 is missing, (last seen|it never came)",
    ),
    "lost while loading": (
        partial(run, work.load_while_one_is_lost),
        [1, 1],
        r"rank 0 waited \d+ s in loading: rank 1 is missing, last seen \d+ s ago in loading",
    ),
    "silent in an exchange": (
        partial(run, work.serve_with_one_silent, 3),
        [1, 1, 1],
        r"rank ([02]) lost another rank \(combine failed on rank \1 of .*: nothing came from rank 1 for 1 s\) "
        rf"{STEP_2} .*: rank 1 {STEP_2} .* at watched_jobs.py:\d+ \(oversleep\); "
        f"see what holds it, and its log, then {AGAIN}; or raise --dcp-exchange-timeout$",
    ),
    "left apart": (partial(run, work.leave_apart, 3), [0, 0, 0], ""),
    "loading": (partial(run, work.take_turns_loading), [0, 0], ""),
    # Longer than the timeout, and than the timer that would end a rank without a watchdog.
    "paused": (partial(run, work.pause_in_a_step, stopped_seconds=17), [0, 0], ""),
    "lost store": (partial(run, work.go_on, store_seconds=3), [0, 0], ""),
}


@pytest.fixture(scope="module")
def jobs() -> Iterator[dict[str, Future[Ended]]]:
    """Run all jobs, a few at a time, since most of their time is waiting."""
    with ThreadPoolExecutor(4) as pool:
        yield {name: pool.submit(start) for name, (start, _, _) in JOBS.items()}


@pytest.mark.parametrize("name", JOBS)
def test_every_rank_ends_with_one_line(name: str, jobs: dict[str, Future[Ended]]) -> None:
    _, codes, line = JOBS[name]
    ended = jobs[name].result()
    assert ended.codes == codes, ended.text
    assert len(ended.lines) == (line != ""), ended.text
    assert not line or re.match(f"dcpmla: error: {line}", ended.lines[0]), ended.lines[0]
    assert ended.seconds < TIMEOUT + MARGIN
    assert ("Traceback" in ended.text) == (name == "bug"), ended.text


def test_timeout_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"timeout \(--timeout\) is 0; it must be a number of seconds above 0"):
        Watchdog(dist.HashStore(), 0, 1, 0)


def test_one_process_is_left_as_it_was() -> None:
    """Signal handlers and threads are as before; a mistake is reported and raised on."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(Reported), Watchdog(dist.HashStore(), 0, 1, 60):
        raise ValueError("wrong")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert signal.set_wakeup_fd(-1) == -1


def test_a_store_that_hangs_at_the_end_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer ends a watched process whose native code hangs. If it stayed armed, it would end the process later."""
    armed, hangs, is_hanging, is_over = set[str](), threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(watchdog, "_GRACE", 0.1)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: armed.add("timer"))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", armed.clear)
    write = Board.write

    def write_or_hang(board: Board, post: Post) -> None:
        if hangs.is_set():
            is_hanging.set()
            is_over.wait()
        write(board, post)

    monkeypatch.setattr(Board, "write", write_or_hang)
    with Watchdog(dist.HashStore(), 0, 1, 60):
        hangs.set()
        assert is_hanging.wait(60)
        assert armed
    assert not armed
    is_over.set()


def test_flight_records_replace_only_this_user_s_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link, or a file of another user, stays as it was; an old record of one's own is replaced."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "flight "))
    target, own, foreign = tmp_path / "target", tmp_path / "flight 1", tmp_path / "flight 2"
    for file in (target, own, foreign):
        file.write_bytes(b"old" * 9999)
    (tmp_path / "flight 0").symlink_to(target)
    for rank in (0, 1):
        write_flight_record(rank)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    write_flight_record(2)
    assert target.read_bytes() == foreign.read_bytes() == b"old" * 9999
    assert b"oldold" not in own.read_bytes()
