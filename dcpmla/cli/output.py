"""Result files: known to be writable before the work starts, written whole or not at all; or line by line, so that a
later run can resume.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

_KEYS = ["id", "token_ids", "text", "finish_reason"]  # the first keys of every line, in this order
_BEGINNING = b'{"id": '
_BEGUN_LINE = re.compile(rb'\{"id": (-?\d+|"([^"\\]|\\.)*"), "token_ids": \[')


def check_writable(option: str, path: Path | None, model: Path | None = None) -> None:
    """Raise ValueError, naming the option, unless a file can be put at the path.

    Args:
        path: Path of the file; None passes.
        model: Directory of a model that is read: none of its files may be overwritten.
    """
    if path is None:
        return
    try:
        _check_is_file(option, path)
        _check_not_in_model(option, path, model)
        with _new_file(path) as file:
            os.unlink(file.name)
    except OSError as error:
        raise _unwritable(option, path, error) from error


def _unwritable(option: str, path: Path, error: OSError) -> ValueError:
    where = f"{path}, where no file can be written ({error.strerror})"
    return ValueError(f"{option} is {where}; give a path in a writable directory")


def _check_is_file(option: str, path: Path) -> None:
    """Raise ValueError for a path that exists and is no file."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{option} is {path}, which exists and is not a file; give the name of a file")


def _check_not_in_model(option: str, path: Path, model: Path | None) -> None:
    """Raise ValueError for a file that exists in a model's directory, by whatever name; links are followed."""
    if model is None or not path.exists():
        return
    is_inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(model))
    # Files of a model from the hub are links to a store of their own.
    if is_inside or any(path.samefile(file) for file in model.iterdir() if file.exists()):
        raise ValueError(f"{option} is {path}, a file in the model's directory; give the name of another file")


def is_same_path(one: Path, other: Path) -> bool:
    """Return whether both lead to the same file, links followed."""
    return os.path.realpath(one) == os.path.realpath(other)


def align(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines of a table: the names of its columns, then rows with the same names, all aligned right."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


class Section(NamedTuple):
    """A part of a report: its contents in JSON, and the lines to print."""

    content: dict[str, Any]
    lines: list[str]


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
    """Write to a new file, then rename it: a reader sees the old content or the whole new one."""
    path = Path(os.path.realpath(path))  # a link stays, its target is replaced
    with _new_file(path) as file:
        try:
            write(file)
            file.close()
            if path.exists():
                shutil.copymode(path, file.name)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _new_file(path: Path) -> IO[bytes]:
    """Create a file of another name in the same directory (for a link, its target's); the umask decides its mode. A
    name that is too long fails here, before the work.
    """
    path = Path(os.path.realpath(path))  # unlike Path.resolve, it does not raise RuntimeError for loops of links
    return open(path.parent / f".{path.name}.{secrets.token_hex(4)}", "xb")


class OutputLines:
    """A file of JSON lines, open for appending as requests finish.

    Attributes:
        ids: Request ids of the outputs that it had when it was opened.
        num_bytes: Size of the whole outputs. Bytes after them, of a line that was cut off, are dropped by `append`.
    """

    def __init__(self, path: Path, descriptor: int, content: bytes) -> None:
        """Take an open file.

        Raises:
            ValueError: The content is not of this program.
        """
        self.path, self._descriptor = path, descriptor
        self.ids, self.num_bytes = _read_outputs(path, content)
        self._separator = b"" if content[: self.num_bytes].endswith(b"\n") or not self.num_bytes else b"\n"

    def append(self, outputs: Sequence[dict[str, Any]]) -> None:
        """Write a line for each output to the disk before this returns.

        Raises:
            OSError: The disk is full; the file ends with the last line that fits.
        """
        if not outputs:
            return
        try:
            try:
                for output in outputs:
                    # UTF-8 lacks half a surrogate pair: it becomes its escape in JSON.
                    text = json.dumps(output, ensure_ascii=False).encode(errors="backslashreplace")
                    self._write(self._separator + text + b"\n")
            finally:
                os.fsync(self._descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _write(self, line: bytes) -> None:
        """Write a line after the whole outputs, or nothing."""
        try:
            os.ftruncate(self._descriptor, self.num_bytes)
            written = 0
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError:
            os.ftruncate(self._descriptor, self.num_bytes)
            raise
        self.num_bytes, self._separator = self.num_bytes + len(line), b""


@contextmanager
def open_output_lines(path: Path, model: Path | None = None) -> Iterator[OutputLines]:
    """Open or make an output file for this run alone. A new file that gets no lines is removed at the end.

    Args:
        model: Directory of a model that is read: of its files only an earlier run's outputs are appended to.
    Raises:
        ValueError: No file can be written there, another run writes it, or its content is not an earlier run's.
    """
    try:
        existed = path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise _unwritable("--output-file", path, error) from error
    with open(descriptor, "ab"):
        _check_is_file("--output-file", path)
        _lock(path, descriptor)
        lines = OutputLines(path, descriptor, path.read_bytes())
        if existed and not lines.num_bytes:
            _check_not_in_model("--output-file", path, model)
        try:
            yield lines
        finally:
            if not (existed or lines.num_bytes):
                os.unlink(os.path.realpath(path))


def _lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"--output-file is {path}, which another run is writing; wait for it, or give another file"
        ) from error
    except OSError:
        pass  # the file system has no locks: the user keeps runs apart


def _read_outputs(path: Path, content: bytes) -> tuple[frozenset[str | int], int]:
    """Return the ids of all whole outputs, and their bytes. A last line of this program may be cut off.

    Raises:
        ValueError: A line that this program did not write.
    """
    *lines, last = content.split(b"\n")
    if last and _read_id(last) is not None:  # only the line's end is missing
        lines, last = [*lines, last], b""
    ids = [_read_id(line) for line in lines]
    wrong = f"line {ids.index(None) + 1}" if None in ids else "last line" if last and not _is_cut(last, lines) else ""
    if wrong:
        raise ValueError(
            f"--output-file is {path}, whose {wrong} is no output of generate; give a new file, or one that generate "
            "wrote"
        )
    return frozenset(request_id for request_id in ids if request_id is not None), len(content) - len(last)


def _is_cut(line: bytes, lines: Sequence[bytes]) -> bool:
    """Return whether this is the beginning of a line of this program: after other lines any beginning, else one long
    enough that no other program writes it.
    """
    if _parse(line) is not None:
        return False
    is_beginning = line.startswith(_BEGINNING) or _BEGINNING.startswith(line)
    return _BEGUN_LINE.match(line) is not None or (bool(lines) and is_beginning)


def _read_id(line: bytes) -> str | int | None:
    """Return an output's id, or None unless the line is as `append` writes it."""
    output = _parse(line) if _BEGUN_LINE.match(line) else None
    if not isinstance(output, dict) or list(output)[: len(_KEYS)] != _KEYS:
        return None
    request_id: str | int = output["id"]
    return request_id


def _parse(line: bytes) -> object:
    """Return the value of a line of JSON, or None."""
    with suppress(ValueError, RecursionError):
        return json.loads(line)
    return None
