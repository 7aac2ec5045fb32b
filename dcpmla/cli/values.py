"""Values of options, read for argparse."""

import argparse
from collections.abc import Sequence

from dcpmla.config import DCP_COMM_BACKENDS


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> int:
    """Read a number of seconds, up to a week."""
    number = positive(text)
    if number > 604800:
        raise argparse.ArgumentTypeError(f"{text!r} is more than a week, 604800 seconds")
    return number


def positive_list(text: str) -> list[int]:
    """Read whole numbers of at least 1, separated by commas."""
    return [positive(item) for item in text.split(",")]


def name_list(text: str, choices: Sequence[str], what: str) -> list[str]:
    """Read names separated by commas, each once."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in choices:
            raise argparse.ArgumentTypeError(f"{name!r} is not {what}; choose from {', '.join(choices)}")
    return names


def exchange_list(text: str) -> list[str]:
    """Read names of exchanges separated by commas, each once."""
    return name_list(text, DCP_COMM_BACKENDS, "an exchange")


def token_ids(text: str) -> list[int]:
    """Read whole numbers separated by commas; the model decides later which of them are tokens."""
    try:
        return [int(token) for token in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of token ids separated by commas, as in 5,6,7"
        ) from None


def seed(text: str) -> int:
    """Read a whole number in [0, 2^32)."""
    if not text.isdecimal() or int(text) >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in [0, 2^32)")
    return int(text)
