"""`python -m dcpmla COMMAND`: a user's mistake prints one line and exits with 2; see docs/faults.md for others."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from itertools import takewhile
from typing import Any, NoReturn

from dcpmla.extras import needed_by
from dcpmla.job.join import share_mistake
from dcpmla.job.launcher import claimed_rank
from dcpmla.job.local_ranks import end_with_parent
from dcpmla.job.watchdog import Reported

_COMMANDS = {  # modules of dcpmla.cli
    "generate": "generate from prompts",
    "serve": "answer HTTP requests in OpenAI's API",
    "bench": "measure",
    "plan": "predict memory and speed, from a config alone",
    "doctor": "say what this machine can do, and prove it",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ValueErrors, so that one rank reports mistakes, not all; no abbreviated options.

    Args:
        fill: Function that adds the arguments, called on demand, so that a command imports no other command's modules.
    Attributes:
        rewrite: Function of the arguments whose result is parsed.
    """

    def __init__(self, *args: Any, fill: Callable[["Parser"], None] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})
        self._fill = fill
        self.rewrite: Callable[[Sequence[str]], Sequence[str]] = lambda arguments: arguments

    def filled(self) -> "Parser":
        """Add the arguments, whose help then shows their defaults, and return the parser."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)
            for action in self._actions:
                is_shown = action.default is not False and action.default not in (None, (), [], argparse.SUPPRESS)
                if is_shown and action.help is not None:
                    text = action.help.removesuffix(" (default: %(default)s)")  # argparse adds it before Python 3.13
                    action.help = f"{text.removesuffix('.')}. Default: %(default)s."
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Add the arguments, refuse unknown options, then parse as argparse does. An option replaces a positional
        argument of its name.
        """
        self.filled()
        if args is not None and self._subparsers is None:
            args = [*self.rewrite(args)]
            self._check_names(args)
        given = {text.partition("=")[0] for text in args or ()}
        replaced = {action.dest for action in self._actions if given.intersection(action.option_strings)}
        self._actions[:] = [each for each in self._actions if each.option_strings or each.dest not in replaced]
        return super().parse_known_args(args, namespace)

    def _check_names(self, arguments: Sequence[str]) -> None:
        """Raise ValueError, with the nearest option, for the first long option that does not exist: its value would
        else be taken for another argument.
        """
        options = self._option_string_actions
        for index, argument in enumerate(arguments):
            name = argument.partition("=")[0]
            if argument == "--":
                return
            if argument.startswith("--") and " " not in argument and name not in options:
                values = takewhile(lambda value: not value.startswith("-"), arguments[index + 1 :])
                near = get_close_matches(name, options, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                self.error(f"unrecognized arguments: {' '.join([argument, *values])}{hint}")

    def error(self, message: str) -> NoReturn:
        """Raise ValueError."""
        raise ValueError(message)


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(prog="dcpmla", description="MLA with its latent KV cache sharded over a tensor-parallel group")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    for name, summary in _COMMANDS.items():
        commands.add_parser(name, help=summary, fill=_fill)
    return parser


def _fill(parser: Parser) -> None:
    command = import_module(f"dcpmla.cli.{parser.prog.split()[-1]}")
    parser.description = command.__doc__
    command.add_arguments(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code.

    Args:
        argv: Arguments of the command; None takes the program's, which may then be run again for each rank of a job.
    """
    code: int | None = None
    try:
        with needed_by("this command"):
            if argv is None:
                end_with_parent(os.environ)
            args = build_parser().parse_args(argv)
            if argv is None and "launch" in args:
                code = args.launch(args)
            if code is None:
                code = args.run(args)
    except Reported:
        return 2
    except ValueError as error:  # before the ranks are connected
        _report(error)
        return 2
    except ConnectionError as error:  # this rank could not connect to the others
        _say(str(error))
        return 1
    except KeyboardInterrupt:  # before or after a watchdog
        _say("was asked to stop (SIGINT)")
        return 130
    return code or 0


def _report(mistake: ValueError) -> None:
    """Print the error once for all ranks if they can still communicate, else on each rank."""
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
