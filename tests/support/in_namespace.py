"""Run a Python program in a network namespace.

Usage: python in_namespace.py NAME PROGRAM [ARGUMENT ...]
"""

import ctypes
import os
import sys

from tests.support.launchers import run_program

_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x20000
_MS_REC, _MS_SLAVE = 0x4000, 0x80000


def enter_namespace(name: str) -> None:
    """Let this thread, and those that it starts, use a namespace's network and see its devices in /sys."""
    namespace = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.setns(namespace, _CLONE_NEWNET)
        or libc.unshare(_CLONE_NEWNS)
        or libc.mount(b"", b"/", b"none", _MS_SLAVE | _MS_REC, None)
        or libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None)
    ):
        raise OSError(ctypes.get_errno(), f"no way into {name}")
    os.close(namespace)


if __name__ == "__main__":
    name, *program = sys.argv[1:]
    enter_namespace(name)
    run_program(program, dict(os.environ))
