"""Run a Python program in a network namespace.

Usage: python in_namespace.py NAME PROGRAM [ARGUMENT ...]
"""

import ctypes
import os
import sys

from tests.support.launchers import run_program

_CLONE_NEWNET = 0x40000000

if __name__ == "__main__":
    name, *program = sys.argv[1:]
    namespace = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns {name}")
    os.close(namespace)
    run_program(program, dict(os.environ))
