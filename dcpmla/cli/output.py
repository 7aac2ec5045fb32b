"""Result files: known to be writable before the work starts, written whole or not at all; or line by line, so that a
later run can resume.
"""

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

_BEGINNING = b'{"id": '  # of every line
_KEYS = {"id", "token_ids", "finish_reason"}  # what a line has at least


def check_writable(option: str, path: Path | None, model: Path | None = None) -> None:
    """Raise ValueError, naming the option, unless a file can be put at the path.

    Args:
        path: None is not wanted, and fine.
        model: directory of a model that is read: none of its files may be overwritten.
    """
    if path is None:
        return
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{option} is {path}, which is there and not a file; give the name of a file")
        _check_not_in_model(option, path, model)
        with _beside(path):
            pass
    except OSError as error:
        message = (
            f"{option} is {path}, where no file can be written ({error.strerror}); give a path in a writable directory"
        )
        raise ValueError(message) from error


def _check_not_in_model(option: str, path: Path, model: Path | None) -> None:
    """Raise ValueError for a file that exists in a model's directory, by whatever name; links are followed."""
    if model is None or not path.exists():
        return
    is_inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(model))
    # Files of a model from the hub are links to a store of their own.
    if is_inside or any(path.samefile(file) for file in model.iterdir() if file.exists()):
        raise ValueError(f"{option} is {path}, a file in the model's directory; give the name of another file")


def is_same_path(one: Path, other: Path) -> bool:
    """Tell whether both lead to the same file, links followed."""
    return os.path.realpath(one) == os.path.realpath(other)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write content as JSON."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(path, text.encode())


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write named arrays as .npz."""
    _replace(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]


def write_bytes(path: Path, content: bytes) -> None:
    """Write content as it is."""
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
    """Make a temporary file beside the path (beside what a link points to). A name that is too long fails here, before
    the work.
    """
    path = Path(os.path.realpath(path))  # unlike Path.resolve, it leaves loops of links to whoever opens them
    return tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=delete)


class OutputLines:
    """A file of JSON lines, open for appending as requests finish.

    Attributes:
        ids: of the outputs that were in it when it was opened.
    """

    def __init__(self, path: Path, descriptor: int, ids: frozenset[str | int], num_bytes: int) -> None:
        self.path, self.ids, self.num_bytes = path, ids, num_bytes
        self._descriptor = descriptor

    def append(self, outputs: Sequence[dict[str, Any]]) -> None:
        """Write a line for each output, id first, all of them to the disk before this returns; or none of them.

        Raises:
            OSError: no room; the file ends with the line before.
        """
        # Half a surrogate pair has no UTF-8: it becomes the escape that JSON has for it.
        lines = b"".join(
            json.dumps(output, ensure_ascii=False).encode(errors="backslashreplace") + b"\n" for output in outputs
        )
        if not lines:
            return
        try:
            written = 0
            while written < len(lines):
                written += os.write(self._descriptor, lines[written:])
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, self.num_bytes)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.num_bytes += len(lines)


@contextmanager
def open_output_lines(path: Path, model: Path | None = None) -> Iterator[OutputLines]:
    """Open or make an output file for this run alone. A last line that was cut off is dropped; a file without lines
    is removed at the end.

    Args:
        model: directory of a model that is read: of its files only an earlier run's outputs are appended to.
    Raises:
        ValueError: no file can be there, another run writes it, or it holds something else than outputs.
    """
    try:
        existed = path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        message = (
            f"--output-file is {path}, where no file can be written ({error.strerror}); "
            f"give a path in a writable directory"
        )
        raise ValueError(message) from error
    try:
        if not path.is_file():
            raise ValueError(f"--output-file is {path}, which is there and not a file; give the name of a file")
        _lock(path, descriptor)
        content = path.read_bytes()
        num_whole = content.rfind(b"\n") + 1
        ids = frozenset(_read_ids(path, content, num_whole))
        if existed and not ids:
            _check_not_in_model("--output-file", path, model)
        os.ftruncate(descriptor, num_whole)
        lines = OutputLines(path, descriptor, ids, num_whole)
        try:
            yield lines
        finally:
            if not lines.num_bytes:
                path.unlink()
    finally:
        os.close(descriptor)


def _lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"--output-file is {path}, which another run is writing; wait for it, or give another file"
        ) from error
    except OSError:
        pass  # a file system without locks: then it is the user who keeps runs apart


def _read_ids(path: Path, content: bytes, num_whole: int) -> Iterator[str | int]:
    """Yield the id of every complete line; the rest must look like the beginning of another.

    Raises:
        ValueError: a line that is no output.
    """
    *lines, rest = [*content[:num_whole].split(b"\n")[:-1], content[num_whole:]]
    for number, line in enumerate(lines, start=1):
        request_id = _read_id(line)
        if request_id is None:
            raise ValueError(
                f"--output-file is {path}, whose line {number} is no output of generate; give another file"
            )
        yield request_id
    if not (rest.startswith(_BEGINNING) or _BEGINNING.startswith(rest)):
        raise ValueError(f"--output-file is {path}, whose last line is no output of generate; give another file")


def _read_id(line: bytes) -> str | int | None:
    """Return an output's id, or None where the line is no output."""
    try:
        output = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_output = isinstance(output, dict) and output.keys() >= _KEYS and isinstance(output["id"], str | int)
    return output["id"] if is_output else None
