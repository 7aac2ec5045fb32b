"""A rank for `run_local_ranks` that imports nothing of the package: writes its variables, then does what it is asked.

Arguments: a directory, then what each rank does.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_GOT: list[str] = []  # signals


def main(directory: Path, *actions: str) -> None:
    rank, pid = int(os.environ["RANK"]), os.getpid()
    work, _, value = actions[rank].partition(" ")
    if work in ("drain", "ignore"):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: _GOT.append(signal.Signals(number).name))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if work == "ignore":
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"]).pid if work == "leave" else None
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "DCPMLA_PARENT"]
    found = {name: os.environ[name] for name in names} | {"pid": pid, "child": child}
    print(f"rank {rank} says so", flush=True)
    print(f"warning of {rank}\n\ndcpmla: error: rank {rank} is one", file=sys.stderr, flush=True)
    (directory / f"new {rank}").write_text(json.dumps(found))
    (directory / f"new {rank}").rename(directory / f"rank {rank}")
    while not all((directory / f"rank {other}").exists() for other in range(len(actions))):
        time.sleep(0.01)
    if work == "exit":
        sys.exit(int(value))
    if work == "kill":
        os.kill(pid, int(value))
    if work == "leave":
        return
    got = directory / f"got {rank}"
    while work != "drain" or len(_GOT) < int(value):
        got.write_text(" ".join(_GOT))
        time.sleep(0.02)
    got.write_text(" ".join(_GOT))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
