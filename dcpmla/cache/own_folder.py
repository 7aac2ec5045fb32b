"""Folders and files that are this user's alone, in directories where other users may have put anything."""

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from weakref import finalize

_OTHERS, _READ = stat.S_IRWXG | stat.S_IRWXO, stat.S_IRGRP | stat.S_IROTH
_WRITES = os.O_RDWR | os.O_WRONLY


class OwnFolder:
    """A folder of this user that others cannot enter, held by its descriptor: whatever gets its path later is not it.

    Its path may lead through links, its last name may not be one.

    Args:
        path: Path of the folder, made with its parents if it does not exist.
    Raises:
        OSError: It cannot be made or opened, is no folder, another user's, or open to others.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        self.path = path
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        finalize(self, os.close, self._folder)
        _check(path, self._folder, stat.S_ISDIR)

    def names(self) -> list[str]:
        """Return the names of all that the folder contains, in order."""
        return sorted(os.listdir(self._folder))

    def open(self, name: str, flags: int) -> int:
        """Open a file, and return its descriptor. With O_CREAT it is made, and must not be there.

        A file that is only read may be readable to others: the folder keeps them out.

        Raises:
            OSError: It cannot be opened, is a link or no file, has another name, too, or is not this user's alone.
        """
        if flags & os.O_CREAT:
            flags |= os.O_EXCL
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK  # nobody waits for the other end of a pipe
        descriptor = os.open(name, flags, mode=0o600, dir_fd=self._folder)
        try:
            _check(self.path / name, descriptor, stat.S_ISREG, _OTHERS if flags & _WRITES else _OTHERS & ~_READ)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def remove(self, name: str) -> None:
        """Remove a file, or a link, if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)

    def read(self, name: str) -> str:
        """Return the text of a file."""
        with open(self.open(name, os.O_RDONLY)) as file:
            return file.read()

    def write(self, name: str, text: str) -> None:
        """Write a file under a name; readers see what had it before, or all of the file."""
        written = f"{name}.{os.getpid()}"
        self.remove(written)  # of a process with the same number
        with open(self.open(written, os.O_WRONLY | os.O_CREAT), "w") as file:
            file.write(text)
        os.replace(written, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)


def _check(path: Path, descriptor: int, is_kind: Callable[[int], bool], closed: int = _OTHERS) -> None:
    """Raise PermissionError for what is of another kind, has several names, or is not this user's alone."""
    found = os.fstat(descriptor)
    wrong = None
    if not is_kind(found.st_mode):
        wrong = "is no file" if is_kind is stat.S_ISREG else "is no directory"
    elif found.st_uid != os.geteuid():
        wrong = f"belongs to user {found.st_uid}, not to {os.geteuid()}"
    elif found.st_mode & closed:
        wrong = f"has mode {stat.S_IMODE(found.st_mode):04o}, which is open to other users"
    elif stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        wrong = f"has {found.st_nlink} names"
    if wrong:
        raise PermissionError(f"{path} {wrong}")
