"""The watchdog: ends this process, with one line per job, when any rank fails, hangs, dies or gets a stop signal."""

import faulthandler
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

import torch.distributed as dist

from dcpmla.job.board import BEAT, LOOK, Board, Claim, current_line
from dcpmla.job.faults import (
    RESTART,
    Fault,
    Post,
    Verdict,
    blame,
    describe_missing,
    describe_posts,
    explain,
    find_missing,
)
from dcpmla.job.flight_record import write_flight_record
from dcpmla.job.signals import StopSignals, pause

_GRACE = 5.0  # seconds that the store may take to answer
_NO_STORE = (
    "the job's store does not answer: who holds it on the first host, the launcher or rank 0, is gone or stopped: "
    f"see its log, then {RESTART}"
)


class Reported(ValueError):
    """A user's mistake that has been printed already."""


class _Operation(NamedTuple):
    number: int
    name: str
    since: float
    limit: float


class Watchdog:
    """A context manager that ends all ranks of the job when any rank fails, hangs, dies or gets a stop signal.

    The main thread announces each operation with `enter`; all ranks enter the same operations in the same order. A
    thread posts the current one to the store twice a second, and ends this process

    - when the main thread stays in an operation past its limit, unless a rank that it waits for is within its own,
    - when an exception leaves the block, or SIGTERM or SIGINT arrives, also while the main thread is in native code
      (but see `on_stop`),
    - when another rank has ended for such a reason.

    The first rank to claim it prints the line; without a store each rank prints its own. A second thread, which never
    touches the store, takes the signals, and takes over when the store does not answer. The watchdog uses no process
    groups; their timeouts should be longer than its own. After SIGTSTP (Ctrl-Z) it stops this process until SIGCONT;
    the time in between counts for no operation.

    Exit codes: 1 for a fault, 2 for a user's mistake (ValueError), 128 + n for signal n.

    Args:
        store: Store of the job's ranks; the watchdog clones the connection.
        timeout: Seconds that an operation may take where `enter` names no limit, and that a rank may be silent.
    Raises:
        ValueError: The timeout is not positive.
        Reported: The block ended with a ValueError. Other exceptions end the process at once.
    """

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, timeout: float) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout (--timeout) is {timeout}; it must be a number of seconds above 0")
        self._job_store, self._rank, self._num_ranks, self._timeout = store, rank, num_ranks, timeout
        self._running, self._paused_seconds = threading.Lock(), 0.0  # the lock is held while the process is stopped
        self._operation = _Operation(0, "start-up", self._now(), timeout)
        self._ending: Fault | None = None
        self._num_beats, self._beaten, self._resumed, self._spoken = 0, time.monotonic(), -math.inf, False
        self._left, self._reported, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._on_stop: Callable[[], object] | None = None

    def enter(self, operation: str, timeout: float | None = None) -> None:
        """Announce the main thread's next operation and the seconds it may take, waits for slower ranks not counted."""
        self._operation = _Operation(
            self._operation.number + 1, operation, self._now(), self._timeout if timeout is None else timeout
        )

    def on_stop(self, callback: Callable[[], object]) -> None:
        """Call back, from another thread, at the first SIGTERM or SIGINT, which then does not end the job."""
        self._on_stop = callback

    def __enter__(self) -> Self:
        self._main_thread = threading.get_ident()
        self._board = Board(self._job_store, self._rank, self._num_ranks, self._timeout)
        self._signals = StopSignals(BEAT)
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._talk, self._guard)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, ValueError):
            self._end_soon(explain(error))
            threading.Event().wait()  # until the thread ends the process
        if isinstance(error, ValueError):
            self._report(2, " ".join(str(error).split()))
        self._left.set()
        self._wake.set()
        self._signals.interrupt()
        for thread in self._threads:
            thread.join(_GRACE)
        faulthandler.cancel_dump_traceback_later()  # The thread that does so may still wait for the store.
        self._signals.close()
        if isinstance(error, ValueError):
            raise Reported(*error.args) from error

    # The thread that talks with the store.

    def _talk(self) -> None:
        while not self._left.is_set():
            self._beat()
            self._follow()
            if time.monotonic() - self._board.read_at > LOOK:
                self._board.read_posts()
            if self._ending:
                self._end(self._ending)
            if self._seconds() > min(self._timeout, self._operation.limit):
                self._judge()
            self._wake.wait(BEAT)
        self._beat()
        faulthandler.cancel_dump_traceback_later()

    def _beat(self) -> None:
        now, self._num_beats = time.monotonic(), self._num_beats + 1
        if now - self._beaten > self._timeout:
            self._resumed = now
        self._beaten = now
        seconds, (count, operation, _, limit) = self._seconds(), self._operation
        left, failed = self._left.is_set(), self._ending is not None
        if not left:
            # Native code that holds the interpreter's lock stops both threads. This timer needs no lock, and prints
            # the stacks. It is a thread: without memory for one, the main thread fails, too, and that is reported.
            with suppress(RuntimeError), self._running:
                faulthandler.dump_traceback_later(limit + 2 * _GRACE, exit=True, file=2)
        line, waits = current_line(self._main_thread)
        self._board.write(Post(self._num_beats, count, operation, seconds, limit, line, waits, left, failed))

    def _follow(self) -> None:
        """End this process if another rank has ended the job."""
        claim = self._board.read_claim()
        if claim and not self._reported.is_set():
            self._spoken = True
            self._board.settle(claim)
            time.sleep(2 * BEAT)  # launchers take the first rank that ends for the cause
            self._exit(claim.code)

    def _report(self, code: int, words: str, details: str = "", num_missing: int = 0) -> None:
        """Print the line, if no other rank has claimed to."""
        self._reported.set()
        own = Claim(self._rank, code, self._num_ranks - num_missing)
        claim = self._board.claim(own)
        # A rank that was stopped for so long that the others gave it up, and said so, has nothing to add.
        was_abandoned = time.monotonic() - self._resumed < self._timeout and (self._board.is_lost or num_missing)
        if claim == own and not was_abandoned and not self._spoken:
            # One write, so that no other rank's text gets in between; the line may hold a progress bar.
            os.write(2, f"\n{details}dcpmla: error: {words}\n".encode(errors="replace"))
        self._spoken = True
        self._board.settle(claim)

    def _look(self) -> tuple[list[Post | None], list[int]]:
        """Read all posts twice, seconds apart; return the later ones and the ranks that are missing."""
        before = self._board.read_posts()
        until = self._now() + LOOK
        while self._now() < until:
            time.sleep(BEAT)
            self._beat()
            self._follow()
        after = self._board.read_posts()
        return after, find_missing(before, after) if before and after else []

    def _seconds(self) -> float:
        """Return the time in the operation so far."""
        return self._now() - self._operation.since

    def _now(self) -> float:
        """Return the seconds of a clock without the pauses."""
        with self._running:
            return time.monotonic() - self._paused_seconds

    def _end_soon(self, ending: Fault) -> None:
        self._ending = self._ending or ending
        self._wake.set()

    def _judge(self) -> None:
        """End the job if a rank is missing, or if this rank and all ranks that it waits for are past their limits."""
        operation = self._operation
        posts, missing = self._look()
        if posts:
            verdict = blame(self._rank, posts, missing, self._timeout, self._board.ages())
        else:
            words = f"rank {self._rank} waited {self._seconds():.0f} s in {operation.name}: {_NO_STORE}"
            verdict = Verdict(words, excused=self._seconds() < operation.limit)
        if self._operation is operation and not verdict.excused:
            self._report(1, verdict.words, num_missing=len(missing))
            self._exit(1)

    def _end(self, fault: Fault) -> None:
        posts, missing = self._look() if fault.is_consequence else ([], [])
        advice, details = fault.advice, fault.details
        if missing:
            advice, details = describe_missing(missing, posts, self._board.ages()), ""
        elif fault.is_consequence and self._board.is_lost:
            advice, details = _NO_STORE, ""
        elif fault.is_consequence and fault.code == 1:
            # No rank is missing and none says why: where the others are is a hint.
            others = describe_posts([None if post is None or post.failed else post for post in posts])
            advice = "; ".join(filter(None, (others, advice)))
        words = f"rank {self._rank} {fault.what} in {self._operation.name}: {advice}"
        self._report(fault.code, words, details, len(missing))
        self._exit(fault.code)

    def _exit(self, code: int) -> NoReturn:
        if code == 1:
            write_flight_record(self._rank)
        os._exit(code)

    # The thread that never touches the store.

    def _guard(self) -> None:
        num_silent, answered = 0, self._board.answered_at
        while not self._left.is_set():
            for number in self._signals.read():
                if number == signal.SIGTSTP:
                    self._pause()
                    continue
                callback, self._on_stop = self._on_stop, None
                if callback is not None:
                    callback()
                    continue
                words = f"was asked to stop ({signal.Signals(number).name})"
                self._end_soon(Fault(words, RESTART, is_consequence=True, code=128 + number))
            # Counted, not timed: after a SIGSTOP the other thread gets its turn first.
            num_silent = num_silent + 1 if self._board.answered_at == answered else 0
            answered = self._board.answered_at
            if num_silent * BEAT > _GRACE and not self._board.is_lost:
                self._step_in()

    def _pause(self) -> None:
        with self._running:
            faulthandler.cancel_dump_traceback_later()  # its timer runs on, and would end the process at SIGCONT
            stopped = time.monotonic()
            pause()
            self._paused_seconds += time.monotonic() - stopped

    def _step_in(self) -> None:
        """End this process without the store, if it is due to end, because the other thread hangs."""
        if self._ending or self._spoken or self._seconds() > self._operation.limit:
            self._board.is_lost = True
            fault = self._ending or Fault(f"waited {self._seconds():.0f} s", _NO_STORE)
            self._report(fault.code, f"rank {self._rank} {fault.what} in {self._operation.name}: {_NO_STORE}")
            os._exit(fault.code)
