"""Result files: known to be writable before the work starts, written whole or not at all."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np


def check_writable(option: str, path: Path | None) -> None:
    """Raise ValueError, naming the option, unless a file can be put at the path."""
    if path is None:
        return
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{option} is {path}, which is there and not a file; give the name of a file")
        with _beside(path):
            pass
    except OSError as error:
        message = (
            f"{option} is {path}, where no file can be written ({error.strerror}); give a path in a writable directory"
        )
        raise ValueError(message) from error


def is_same_path(one: Path, other: Path) -> bool:
    """Whether both lead to the same place, links followed."""
    return os.path.realpath(one) == os.path.realpath(other)


def write_json(path: Path, content: dict[str, Any]) -> None:
    _replace(
        path,
        lambda file: file.write((json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()),
    )


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Named arrays as .npz."""
    _replace(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]


def write_bytes(path: Path, content: bytes) -> None:
    _replace(path, lambda file: file.write(content))


def _replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write beside the path, then rename over it: a reader sees the old file or the whole new one."""
    path = Path(os.path.realpath(path))  # a link stays, what it points to is replaced
    with _beside(path, delete=False) as file:
        try:
            write(file)
            file.close()
            os.chmod(file.name, 0o644)  # a temporary file is private; the result is an ordinary one
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _beside(path: Path, delete: bool = True) -> "tempfile._TemporaryFileWrapper[bytes]":
    """A temporary file beside the path (beside what a link points to); a name too long for one fails here, before the
    work.
    """
    path = Path(os.path.realpath(path))  # unlike Path.resolve, it leaves loops of links to whoever opens them
    return tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=delete)
