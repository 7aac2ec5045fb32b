"""A file of JSON lines that grows as requests finish, and that a later run goes on with."""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_BEGINNING = b'{"id": '  # of every line
_KEYS = {"id", "token_ids", "finish_reason"}  # what a line has at least


class OutputLines:
    """An output file, open for appending.

    Attributes:
        ids: of the outputs that were in it.
    """

    def __init__(self, path: Path, descriptor: int, ids: frozenset[str | int], num_bytes: int) -> None:
        self.path, self.ids, self.num_bytes = path, ids, num_bytes
        self._descriptor = descriptor

    def append(self, outputs: Sequence[dict[str, Any]]) -> None:
        """Write a line each, id first, all of them to the disk before this returns; or none of them.

        Raises:
            OSError: no room; the file ends with the line before.
        """
        # What has no place in UTF-8 (half a surrogate pair) becomes the escape that JSON has for it.
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
def open_output_lines(path: Path) -> Iterator[OutputLines]:
    """Open or make an output file for this run alone; a last line that was cut off is dropped, a file without lines
    is not left behind.

    Raises:
        ValueError: no file can be there, another run writes it, or it holds what is no output of such a run.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        message = f"--output-file is {path}, where no file can be written ({error.strerror}); give a path in a writable directory"
        raise ValueError(message) from error
    try:
        if not path.is_file():
            raise ValueError(f"--output-file is {path}, which is there and not a file; give the name of a file")
        _lock(path, descriptor)
        content = path.read_bytes()
        num_whole = content.rfind(b"\n") + 1
        ids = frozenset(_read_ids(path, content, num_whole))
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
    """Of the whole lines. What stands behind them must look like the beginning of another."""
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
    """None where the line is no output."""
    try:
        output = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_output = isinstance(output, dict) and output.keys() >= _KEYS and isinstance(output["id"], str | int)
    return output["id"] if is_output else None
