"""`python -m dcpmla COMMAND`: a user's mistake is one line and exit code 2; faults of ranks: see docs/faults.md."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from dcpmla.cli import bench, doctor, generate, plan
from dcpmla.job.join import share_mistake
from dcpmla.job.launcher import claimed_rank
from dcpmla.job.watchdog import Reported


class _Parser(argparse.ArgumentParser):
    """argparse whose mistakes are ValueErrors, so that one rank reports them and not all; options are written out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dcpmla", description="MLA with its latent KV cache sharded over a tensor-parallel group")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    generate.add_arguments(commands.add_parser("generate", help="generate from prompts", description=generate.__doc__))
    bench.add_arguments(commands.add_parser("bench", help="measure", description=bench.__doc__))
    plan.add_arguments(
        commands.add_parser("plan", help="predict memory and speed, from a config alone", description=plan.__doc__)
    )
    doctor.add_arguments(
        commands.add_parser("doctor", help="say what this machine can do, and prove it", description=doctor.__doc__)
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = build_parser().parse_args(argv)
        code: int | None = args.run(args)
    except Reported:
        return 2
    except ValueError as error:  # before the ranks have met
        _report(error)
        return 2
    except ConnectionError as error:  # this rank's: it has not met the others
        _say(str(error))
        return 1
    return code or 0


def _report(mistake: ValueError) -> None:
    """Say it once for all ranks, if they can still meet; else each for itself."""
    rank = claimed_rank(os.environ)
    if rank is None:
        _say(str(mistake))
        return
    try:
        share_mistake(mistake)
    except Reported:
        return
    except (ValueError, ConnectionError):
        _say(f"rank {rank}: {mistake}")


def _say(words: str) -> None:
    sys.stderr.write(f"dcpmla: error: {' '.join(words.split())}\n")


if __name__ == "__main__":
    sys.exit(main())
