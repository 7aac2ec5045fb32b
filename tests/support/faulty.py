"""`dcpmla` on one rank with a planned fault.

Usage: python faulty.py DIRECTORY '{"rank": 1, "when": "decode step 6", "what": "kill"}' generate ...

The rank leaves its pid in the directory and, when its fault begins, a file named "reached".
"""

import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcpmla.__main__ import main
from dcpmla.job.watchdog import Watchdog


def run(directory: Path, fault: dict[str, Any], arguments: Sequence[str]) -> int:
    """Run `dcpmla` with the fault planned if this is its rank, on the first start only; return the exit code."""
    rank = int(os.environ["RANK"])
    (directory / f"pid {rank} {os.getpid()}").touch()
    if rank == fault.get("rank") and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        _prepare(directory, fault["when"], fault["what"])
    return main(arguments)


def _prepare(directory: Path, when: str, what: str) -> None:
    """Plan `what` for the first operation whose name begins with the words `when` in the main thread, or now."""
    if when == "launch":
        fail(what)
    enter = Watchdog.enter

    def enter_and_fail(watchdog: Watchdog, operation: str, *limit: Any) -> None:
        enter(watchdog, operation, *limit)
        if begins_with(operation, when):
            Watchdog.enter = enter  # type: ignore[method-assign]
            time.sleep(0.7)  # longer than a beat, so that the posts name the operation
            (directory / "reached").touch()
            fail(what)

    Watchdog.enter = enter_and_fail  # type: ignore[method-assign]


def begins_with(operation: str, words: str) -> bool:
    """Return whether an operation's name begins with whole words: "decode step 8" is not "decode step 81"."""
    return re.match(rf"{re.escape(words)}(?!\w)", operation) is not None


def fail(what: str) -> None:
    """Cause the fault."""
    match what:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleep":
            time.sleep(100)
        case "fill":
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, resource.RLIM_INFINITY))


FILE_LIMIT = 50_000  # bytes

if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]))
