"""torchrun without imports: its agent and ranks are forks of a server that has imported all modules."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import run

from tests.support.launchers import ROOT, run_program
from tests.support.ranks import start_process


def start_torchrun(argv: Sequence[object], env: Mapping[str, str], output: Path) -> Any:
    """Start torchrun's agent. The caller must kill and join it.

    Args:
        argv: Options of torchrun, then the Python program and its arguments.
        env: Complete environment.
        output: File for the output of the agent and its ranks.
    """
    return start_process(_run_agent, ([*map(str, argv)], env, output))


def _run_agent(argv: list[str], env: Mapping[str, str], output: Path) -> None:
    multiprocessing.current_process().daemon = False  # Daemons cannot have children.
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    configure = run.config_from_args

    def configure_for_forks(args: Any) -> tuple[Any, Callable[[], None], list[str]]:
        config, _, (_, *program) = configure(args)  # The interpreter and its option -u are dropped.
        return config, lambda: _run_rank(program), []

    run.config_from_args = configure_for_forks
    run.main(["--start-method", "fork", *argv])


def _run_rank(program: list[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # Ranks inherit the agent's handlers.
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_program(program, dict(os.environ))
