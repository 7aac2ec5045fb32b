"""The ranks of this host as children of the command that the user runs: their start, output, signals and end."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import IO, Any

import torch.distributed as dist

from dcpmla.job.faults import RESTART
from dcpmla.job.hosts import Hosts
from dcpmla.job.launcher import PARENT
from dcpmla.job.rendezvous import listen_for_ranks
from dcpmla.job.signals import StopSignals, pause
from dcpmla.parallel.collectives import name_ranks

_LOOK = 0.1  # seconds between two looks at the children
_PAUSE = 2.0  # seconds in which ranks stop by themselves after Ctrl-Z
_LAST_LINES = 1.0  # seconds that a rank's last lines may take
# What ranks get that go on after another one failed, by seconds: a server drains at the first SIGTERM and ends at the
# second. The guard of a server's HTTP process waits 15 s before it kills that.
_STOPS = ((0.0, signal.SIGTERM), (5.0, signal.SIGTERM), (20.0, signal.SIGKILL))
_FOR_GROUPS = (signal.SIGKILL, signal.SIGTSTP, signal.SIGSTOP, signal.SIGCONT)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl
_LINE = b"dcpmla: error: "


def run_local_ranks(num_ranks: int, hosts: Hosts) -> int:
    """Run this program again for each rank of this host, and wait until all of them and their children have ended.

    The first rank has this process's input and outputs. Other ranks are silent on stdout, and each line of their stderr
    gets their number in front. SIGTERM and SIGINT go to all ranks. After SIGTSTP (Ctrl-Z) they stop,
    then this process, and all go on when it gets SIGCONT. When a rank fails, the others are stopped. On the
    first host this process serves the store where the ranks meet, so that no rank's end takes it away.

    Args:
        num_ranks: Number of the job's ranks on all hosts, a multiple of them.
    Returns:
        The exit code: 0, or the code of this host's first failed rank, which is 128 + n after signal n.
    Raises:
        ConnectionError: The port where the ranks meet is taken.
    """
    port, store = _serve_store(hosts)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # a rank's end must not hide its children, as zombies or running
    with closing(StopSignals(_LOOK)) as signals:
        code = _LocalRanks(list(hosts.variables(num_ranks, port)), signals).wait()
    del store
    return code


def end_with_parent(env: Mapping[str, str]) -> None:
    """Have the kernel kill this process, if it is a rank of `run_local_ranks`, when its parent ends for any reason.

    The kernel's signal needs no thread of this process, so it works in native code and before the ranks have met. Also
    take the SIGINT that was held back while Python started: it ends this process without a traceback until the watchdog
    takes it.

    Raises:
        ConnectionError: The parent is gone already.
    """
    parent = env.get(PARENT)
    if parent is None:
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if parent != str(os.getppid()):
        raise ConnectionError(f"process {parent} ({PARENT}), which started this rank, is gone")


def _serve_store(hosts: Hosts) -> tuple[int, dist.Store | None]:
    """Return the port where the ranks meet, and the store there if this is the first host."""
    host, port = hosts.address
    if hosts.node_rank:
        return port, None
    try:
        listener = listen_for_ranks(host, port)
    except OSError as error:
        raise ConnectionError(
            f"this host cannot listen at port {port}, where the ranks meet: {os.strerror(error.errno or 0)}; set "
            "master_port (--master-port) to a free port, the same on all hosts"
        ) from error
    port = listener.getsockname()[1]
    options: Any = {"is_master": True, "master_listen_fd": listener.detach()}
    return port, dist.TCPStore(host, port, wait_for_workers=False, **options)


class _LocalRanks:
    """The processes of this host's ranks, each in a process group of its own: Ctrl-C reaches this process alone.

    Args:
        variables: Environment variables of each rank, on top of this process's.
        signals: Signals that this process gets.
    """

    def __init__(self, variables: Sequence[Mapping[str, str]], signals: StopSignals) -> None:
        self._variables, self._signals = variables, signals
        self._alive: dict[int, subprocess.Popen[bytes]] = {}  # by rank, until its whole group has ended
        self._ended: set[int] = set()
        self._relays: list[threading.Thread] = []
        self._code = 0
        self._passed_on: set[int] = set()  # signals
        self._ending_since: float | None = None
        self._stops = list(_STOPS)

    def wait(self) -> int:
        """Start the ranks, wait until all have ended, and return the exit code of the first that failed, or 0."""
        try:
            with _held_back(signal.SIGINT):
                for variables in self._variables:
                    self._start(variables)
            while self._alive:
                for number in self._signals.read():
                    if number == signal.SIGTSTP:
                        self._pause()
                        continue
                    self._passed_on.add(number)
                    self._send(number)
                for rank, process in list(self._alive.items()):
                    self._look(rank, process)
                self._stop()
        finally:  # with processes left only if this one could not start them all
            self._send(signal.SIGKILL)
        for relay in self._relays:
            relay.join(_LAST_LINES)
        return self._code

    def _start(self, variables: Mapping[str, str]) -> None:
        rank = int(variables["RANK"])
        own: dict[str, Any] = {"env": {**os.environ, **variables}, "process_group": 0}
        if rank:
            own |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, *sys.orig_argv[1:]], **own)
        self._alive[rank] = process
        if process.stderr is not None:
            relay = threading.Thread(target=_relay, args=(rank, process.stderr), daemon=True)
            relay.start()
            self._relays.append(relay)

    def _look(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        """Note a rank's end, and that of its group."""
        code = process.poll()
        if code is None:
            return
        if rank not in self._ended:  # poll may have seen the end before, when a signal was sent
            self._ended.add(rank)
            self._note_end(rank, code)
        with suppress(ChildProcessError):  # a child of the rank, which this process has inherited
            os.waitpid(-process.pid, os.WNOHANG)
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            del self._alive[rank]

    def _note_end(self, rank: int, code: int) -> None:
        is_first = not self._code
        if is_first:
            self._code = code if code >= 0 else 128 - code
        if code >= 0:  # if it failed, it has said why, or another rank has
            return
        name = signal.Signals(-code).name
        if is_first and -code in self._passed_on:
            _say(f"rank {rank} was asked to stop ({name}): {RESTART}")
        elif -code not in self._passed_on and (is_first or -code not in (signal.SIGTERM, signal.SIGKILL)):
            advice = f"see the lines above and dmesg (was memory short?), then {RESTART}"
            _say(f"rank {rank} was killed by {name}: {advice}")

    def _stop(self) -> None:
        """After a rank has failed, stop the others; after all have ended, stop the processes that they have started."""
        if self._ending_since is None and (self._code or self._alive.keys() <= self._ended):
            self._ending_since = time.monotonic()
        while self._ending_since is not None and self._stops:
            seconds, number = self._stops[0]
            if time.monotonic() < self._ending_since + seconds:
                return
            del self._stops[0]
            if number == signal.SIGKILL and self._alive:
                late = name_ranks(list(self._alive))
                _say(f"{late} or its children did not end within {seconds:.0f} s and were killed")
            self._send(number)

    def _pause(self) -> None:
        """Stop the ranks, their children and this process until it gets SIGCONT. The store, which is a thread here,
        answers until the ranks have stopped.
        """
        self._send(signal.SIGTSTP)
        until = time.monotonic() + _PAUSE
        while time.monotonic() < until and not all(map(_is_stopped, self._alive.values())):
            time.sleep(_LOOK / 10)
        self._send(signal.SIGSTOP)
        pause()
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        """Send a signal to all ranks; SIGKILL and those of pauses to their children, too."""
        for process in self._alive.values():
            if number in _FOR_GROUPS:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            else:
                process.send_signal(number)


def _is_stopped(process: "subprocess.Popen[bytes]") -> bool:
    """Return whether a child is stopped, or has ended."""
    with suppress(ChildProcessError):
        options = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, process.pid, options) is not None
    return True


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """Hold a signal back from what a block starts: Python would print its stack for a SIGINT while it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _relay(rank: int, lines: IO[bytes]) -> None:
    """Print a rank's lines with its number in front, except the watchdog's, which name it."""
    for line in lines:
        head = b"" if line.isspace() or line.startswith(_LINE) else f"rank {rank}: ".encode()
        with suppress(OSError, ValueError):  # this process's stderr is closed; the rank must not block
            sys.stderr.buffer.write(head + line)
            sys.stderr.buffer.flush()


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _say(words: str) -> None:
    # The first rank may have left the cursor in a progress bar.
    sys.stderr.write(f"\ndcpmla: error: {words}\n")
    sys.stderr.flush()
