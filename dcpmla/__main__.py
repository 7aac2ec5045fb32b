"""`python -m dcpmla COMMAND`: a user's mistake is one line on the first rank and exit code 2."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from dcpmla.cli import generate


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
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = build_parser().parse_args(argv)
        args.run(args)
    except ValueError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"dcpmla: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
