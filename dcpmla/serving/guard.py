"""The process between the first rank and the HTTP process: it ends the HTTP process after the first rank is gone.

Without it, an HTTP process that is stopped or stuck would keep the port, and no restarted job could listen there.
"""

import os
import select
import signal
from collections.abc import Callable, Sequence
from socket import socket
from typing import NoReturn

from dcpmla.serving.forks import fork

_SECONDS = 15.0  # time for the last answers, after the first rank's end; a busy host needs more than a few


def guard(main: Callable[[], object], sockets: Sequence[socket], owner: int) -> NoReturn:
    """Run a function in a child process and end as it does, with the exit code 128 + n for signal n.

    Args:
        main: Function of the child.
        sockets: The child's sockets, which this process closes.
        owner: Reading end of a pipe that ends with the first rank, the only holder of its writing end.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # Launchers send them to all processes; the ranks decide.
    pid = fork(main)
    child = os.pidfd_open(pid)
    for each in sockets:
        each.close()
    ended, _, _ = select.select([child, owner], [], [])
    if child not in ended and not select.select([child], [], [], _SECONDS)[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(code if code >= 0 else 128 - code)
