"""The watchdog: ends this process, with one line per job, when any rank fails, hangs, dies or gets a stop signal."""

import faulthandler
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import NamedTuple, NoReturn, Self, TypeVar

import torch.distributed as dist

from dcpmla.job.faults import (
    RESTART,
    Ages,
    Fault,
    Post,
    Verdict,
    blame,
    describe_missing,
    describe_posts,
    explain,
    find_missing,
    read_post,
)
from dcpmla.job.flight_record import write_flight_record

_BEAT = 0.5  # seconds between two posts of a rank
_LOOK = 2.0  # seconds between two reads of all posts: a rank without a post in between is missing
_GRACE = 5.0  # seconds that the store may take to answer
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_NO_STORE = (
    "the job's store does not answer: who holds it, torchrun's agent or rank 0, is gone or stopped: see its log, "
    f"then {RESTART}"
)
_T = TypeVar("_T")


class Reported(ValueError):
    """A user's mistake that has been printed already."""


class _Operation(NamedTuple):
    number: int
    name: str
    since: float
    limit: float


class _Ending(NamedTuple):
    fault: Fault
    code: int


class _Claim(NamedTuple):
    """The end of the job, by the rank that prints why."""

    rank: int
    code: int
    num_alive: int

    @classmethod
    def read(cls, text: bytes) -> Self | None:
        """Return a claim from the store; None for a value of another program or a broken one."""
        try:
            claim = cls(*json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        return claim if all(type(number) is int for number in claim) and 0 <= claim.code <= 255 else None


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
    groups; their timeouts should be longer than its own.

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
        self._operation = _Operation(0, "start-up", time.monotonic(), timeout)
        self._ending: _Ending | None = None
        self._num_beats, self._answered, self._store_lost = 0, time.monotonic(), False
        self._beaten, self._resumed, self._spoken = time.monotonic(), -math.inf, False
        self._ages, self._looked = Ages(timeout), -math.inf
        self._last_posts: list[Post | None] = [None] * num_ranks
        self._left, self._reported, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._on_stop: Callable[[], object] | None = None

    def enter(self, operation: str, timeout: float | None = None) -> None:
        """Announce the main thread's next operation and the seconds it may take, waits for slower ranks not counted."""
        self._operation = _Operation(
            self._operation.number + 1, operation, time.monotonic(), self._timeout if timeout is None else timeout
        )

    def on_stop(self, callback: Callable[[], object]) -> None:
        """Call back, from another thread, at the first SIGTERM or SIGINT, which then does not end the job."""
        self._on_stop = callback

    def __enter__(self) -> Self:
        self._main_thread = threading.get_ident()
        self._store = dist.PrefixStore("watchdog", self._job_store.clone())  # type: ignore[attr-defined]
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._signals.settimeout(_BEAT)
        # Python's handlers wait for the main thread, which may be in a collective; the C handler writes at once.
        self._old_wakeup = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._talk, self._guard)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, ValueError):
            self._end_soon(_Ending(explain(error), 1))
            threading.Event().wait()  # until the thread ends the process
        if isinstance(error, ValueError):
            self._report(2, " ".join(str(error).split()))
        self._leave()
        if isinstance(error, ValueError):
            raise Reported(*error.args) from error

    def _leave(self) -> None:
        self._left.set()
        self._wake.set()
        self._wakeup.send(bytes(1))  # not a signal: it wakes the guard
        for thread in self._threads:
            thread.join(_GRACE)
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._signals.close()
        self._wakeup.close()

    # The thread that talks with the store.

    def _talk(self) -> None:
        while not self._left.is_set():
            self._beat()
            self._follow()
            if time.monotonic() - self._looked > _LOOK:
                self._ask(self._posts, None)
            if self._ending:
                self._end(self._ending)
            if self._seconds() > min(self._timeout, self._operation.limit):
                self._judge()
            self._wake.wait(_BEAT)
        self._beat()
        faulthandler.cancel_dump_traceback_later()

    def _beat(self) -> None:
        now, self._num_beats = time.monotonic(), self._num_beats + 1
        if now - self._beaten > self._timeout:
            self._resumed = now
        self._beaten = now
        count, operation, since, limit = self._operation
        # Native code that holds the interpreter's lock stops both threads. This timer needs no lock, and prints where.
        # It is a thread: with no memory left for one, this rank is about to report that anyway.
        with suppress(RuntimeError):
            faulthandler.dump_traceback_later(limit + 2 * _GRACE, exit=True, file=2)
        line, waits = _current_line(self._main_thread)
        left, failed = self._left.is_set(), self._ending is not None
        post = Post(self._num_beats, count, operation, now - since, limit, line, waits, left, failed)
        self._ask(lambda: self._store.set(f"post/{self._rank}", json.dumps(asdict(post))), None)

    def _follow(self) -> None:
        """End this process if another rank has ended the job."""
        text = self._ask(lambda: self._store.get("claim") if self._store.check(["claim"]) else b"", b"")
        claim = _Claim.read(text)
        if claim and not self._reported.is_set():
            self._spoken = True
            self._settle(claim.num_alive)
            time.sleep(2 * _BEAT)  # launchers take the first rank that ends for the cause
            self._exit(claim.code)

    def _report(self, code: int, words: str, details: str = "", num_missing: int = 0) -> None:
        """Print the line, if no other rank has claimed to."""
        self._reported.set()
        own = _Claim(self._rank, code, self._num_ranks - num_missing)
        claim = self._ask(partial(self._claim, own), own)
        # A rank that was stopped for so long that the others gave it up, and said so, has nothing to add.
        was_abandoned = time.monotonic() - self._resumed < self._timeout and (self._store_lost or num_missing)
        if claim == own and not was_abandoned and not self._spoken:
            # One write, so that no other rank's text gets in between; the line may hold a progress bar.
            os.write(2, f"\n{details}dcpmla: error: {words}\n".encode(errors="replace"))
        self._spoken = True
        self._settle(claim.num_alive)

    def _claim(self, own: _Claim) -> _Claim:
        """Return the job's claim: the first rank's, or this rank's where the store has none."""
        text = self._store.compare_set("claim", "", json.dumps(own))
        if _Claim.read(text) is None:
            text = self._store.compare_set("claim", text, json.dumps(own))  # type: ignore[arg-type]
        return _Claim.read(text) or own

    def _settle(self, num_alive: int) -> None:
        """Wait until all ranks have read the claim, since any rank may serve the store."""
        until = time.monotonic() + _LOOK
        num_settled = self._ask(lambda: self._store.add("settled", 1), num_alive)
        while num_settled < num_alive and time.monotonic() < until:
            time.sleep(_BEAT / 5)
            num_settled = self._ask(lambda: self._store.add("settled", 0), num_alive)

    def _posts(self) -> list[Post | None]:
        keys = [f"post/{rank}" for rank in range(self._num_ranks)]
        there = keys if self._store.check(keys) else [key for key in keys if self._store.check([key])]
        posts = dict(zip(there, self._store.multi_get(there), strict=True))
        # A value that is no post counts as silence: its rank writes the next post soon, if it is alive.
        read = [
            (read_post(posts[key]) or last) if key in posts else None
            for key, last in zip(keys, self._last_posts, strict=True)
        ]
        self._last_posts, self._looked = read, time.monotonic()
        self._ages.note(read, self._looked)
        return read

    def _read_ages(self) -> list[float]:
        return [self._ages.read(rank, time.monotonic()) for rank in range(self._num_ranks)]

    def _look(self) -> tuple[list[Post | None], list[int]]:
        """Read all posts twice, seconds apart; return the later ones and the ranks that are missing."""
        before = self._ask(self._posts, None) or []
        until = time.monotonic() + _LOOK
        while time.monotonic() < until:
            time.sleep(_BEAT)
            self._beat()
            self._follow()
        after = self._ask(self._posts, None) or []
        return after, find_missing(before, after) if before and after else []

    def _ask(self, question: Callable[[], _T], otherwise: _T) -> _T:
        """Return the store's answer, or `otherwise` once the store is lost: its client does not reconnect."""
        if self._store_lost:
            return otherwise
        try:
            answer = question()
        except RuntimeError:
            self._store_lost = True
            return otherwise
        self._answered = time.monotonic()
        return answer

    # Ends.

    def _seconds(self) -> float:
        """Return the time in the operation so far."""
        return time.monotonic() - self._operation.since

    def _end_soon(self, ending: _Ending) -> None:
        self._ending = self._ending or ending
        self._wake.set()

    def _judge(self) -> None:
        """End the job if a rank is missing, or if this rank and all ranks that it waits for are past their limits."""
        operation = self._operation
        posts, missing = self._look()
        if posts:
            verdict = blame(self._rank, posts, missing, self._timeout, self._read_ages())
        else:
            words = f"rank {self._rank} {self._waited()} in {operation.name}: {_NO_STORE}"
            verdict = Verdict(words, excused=self._seconds() < operation.limit)
        if self._operation is operation and not verdict.excused:
            self._report(1, verdict.words, num_missing=len(missing))
            self._exit(1)

    def _end(self, ending: _Ending) -> None:
        fault, code = ending
        posts, missing = self._look() if fault.is_consequence else ([], [])
        advice, details = fault.advice, fault.details
        if missing:
            advice, details = describe_missing(missing, posts, self._read_ages()), ""
        elif fault.is_consequence and self._store_lost:
            advice, details = _NO_STORE, ""
        elif fault.is_consequence and code == 1:  # no rank is missing and none says why: where the others are is a hint
            others = describe_posts([None if post is None or post.failed else post for post in posts])
            advice = "; ".join(filter(None, (others, advice)))
        self._report(code, f"rank {self._rank} {fault.what} in {self._operation.name}: {advice}", details, len(missing))
        self._exit(code)

    def _exit(self, code: int) -> NoReturn:
        if code == 1:
            write_flight_record(self._rank)
        os._exit(code)

    def _waited(self) -> str:
        return f"waited {self._seconds():.0f} s"

    # The thread that never touches the store.

    def _guard(self) -> None:
        num_silent, answered = 0, self._answered
        while not self._left.is_set():
            for number in self._read_signals():
                callback, self._on_stop = self._on_stop, None
                if callback is not None:
                    callback()
                    continue
                fault = Fault(f"was asked to stop ({signal.Signals(number).name})", RESTART, is_consequence=True)
                self._end_soon(_Ending(fault, 128 + number))
            # Counted, not timed: after a SIGSTOP the other thread gets its turn first.
            num_silent = num_silent + 1 if self._answered == answered else 0
            answered = self._answered
            if num_silent * _BEAT > _GRACE and not self._store_lost:
                self._step_in()

    def _read_signals(self) -> list[int]:
        try:
            return [number for number in self._signals.recv(64) if number in _SIGNALS]
        except TimeoutError:
            return []

    def _step_in(self) -> None:
        """End this process without the store, if it is due to end, because the other thread hangs."""
        if self._ending or self._spoken or self._seconds() > self._operation.limit:
            self._store_lost = True
            fault, code = self._ending or _Ending(Fault(self._waited(), _NO_STORE), 1)
            self._report(code, f"rank {self._rank} {fault.what} in {self._operation.name}: {_NO_STORE}")
            os._exit(code)


def _current_line(thread: int) -> tuple[str, bool]:
    """Return the line that a thread is at, outside of torch's own code, and whether it is in a collective there."""
    frame, waits = sys._current_frames().get(thread), False
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        waits = waits or frame.f_globals["__name__"].startswith("torch.distributed")
        frame = frame.f_back
    if frame is None:
        return "an unknown line", waits
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})", waits
