"""Forks of a server's processes (`fork`)."""

import os
import traceback
from collections.abc import Callable

_STANDARD_ERROR = 2


def fork(run: Callable[[], object]) -> int:
    """Run a function in a child process, which then ends with the exit code 0; return the child's id.

    An exception of the function is the child's alone, and its traceback goes to standard error.
    """
    pid = os.fork()
    if pid == 0:
        try:
            run()
        except BaseException:
            os.write(_STANDARD_ERROR, traceback.format_exc().encode(errors="replace"))
        finally:
            os._exit(0)
    return pid
