"""Files and folders of this user, in places where other users may have put links, pipes or files of their own.

Nothing is opened before its kind and owner are known, and its descriptor is checked again. An `OwnFolder` holds the
folder's descriptor, so it still reaches the entries of the opened folder after its path was renamed or replaced.
"""

import os
import stat
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_Check = Callable[[Path, os.stat_result], None]


class OwnFolder:
    """A folder whose entries are reached through its descriptor, which is closed with the object.

    Attributes:
        path: Path at the time when it was opened, for messages.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor
        weakref.finalize(self, os.close, descriptor)

    def names(self) -> list[str]:
        """Return the names of all entries, sorted."""
        return sorted(os.listdir(self._descriptor))

    def open_folder(self, name: str, makes: bool = False) -> "OwnFolder":
        """Open a folder of this user that is closed to others.

        Args:
            makes: Whether to make it if it does not exist.
        Raises:
            OSError: It cannot be opened or made.
            PermissionError: It is a link, another user's, or open to other users.
        """
        if makes:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._descriptor)
        path = self.path / name
        return OwnFolder(path, _open(path, os.O_RDONLY | os.O_DIRECTORY, _check_folder, self._descriptor))

    def open_file(self, name: str, flags: int, refused: int = _OTHERS_WRITE) -> int:
        """Open a file of this user (`open_own`) in this folder."""
        return open_own(self.path / name, flags, refused, self._descriptor)

    def check_file(self, name: str, refused: int = _OTHERS_WRITE) -> None:
        """Raise PermissionError if `open_file` would refuse an entry, which may be missing."""
        with suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            _check_file(self.path / name, status, refused)

    def remove_file(self, name: str) -> None:
        """Remove a file of this user if it exists.

        Raises:
            PermissionError: `open_file` would refuse it. It stays.
        """
        self.check_file(name)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)


def open_place(path: Path) -> OwnFolder:
    """Open a folder of this user or of root, which others may share; make it, closed to others, if it does not exist.

    Folders above it are made, too. Links among them must be this user's or root's.

    Raises:
        OSError: It cannot be opened or made.
        PermissionError: It is a link or another user's, or a link above it is.
    """
    path = path.absolute()
    for folder in (*reversed(path.parents), path):
        try:
            status = os.lstat(folder)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700 if folder == path else 0o777)
            continue
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
            raise _refusal(folder, status, f"links of user {os.geteuid()} or of root are followed above the folder")
    return OwnFolder(path, _open(path, os.O_RDONLY | os.O_DIRECTORY, _check_place))


def open_own(path: Path, flags: int, refused: int = _OTHERS_WRITE, folder: int | None = None) -> int:
    """Open a file of this user that has one name, and close it to other users. A new file has mode 0600.

    Args:
        flags: Flags of `os.open`. With O_CREAT a missing file is made.
        refused: Bits of the mode with which an existing file is refused.
        folder: Descriptor of the folder that has the file; None to follow the path.
    Returns:
        The descriptor.
    Raises:
        OSError: It cannot be opened or made.
        PermissionError: It is a link, no regular file, another user's, has further names, or others can write it.
    """
    name = path if folder is None else path.name
    if flags & os.O_CREAT:
        with suppress(FileExistsError):
            return os.open(name, flags | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    descriptor = _open(path, flags & ~os.O_CREAT, lambda path, status: _check_file(path, status, refused), folder)
    try:
        os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def shown(path: Path) -> str:
    """Return a path in one line, whatever characters a name has."""
    text = str(path)
    return text if text.isprintable() else repr(text)


def _open(path: Path, flags: int, check: _Check, folder: int | None = None) -> int:
    """Open what passes a check, both before it is opened and afterwards."""
    name = path if folder is None else path.name
    check(path, os.stat(name, dir_fd=folder, follow_symlinks=False))
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)  # A pipe would make it wait.
    try:
        check(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_file(path: Path, status: os.stat_result, refused: int) -> None:
    if not status.st_nlink:
        raise FileNotFoundError(f"{shown(path)} has been removed")
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_nlink != 1 or status.st_mode & refused:
        raise _refusal(
            path, status, f"only regular files of user {os.geteuid()} with one name that others cannot write are used"
        )


def _check_folder(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise _refusal(path, status, f"only folders of user {os.geteuid()} that are closed to others (0700) are used")


def _check_place(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (0, os.geteuid()):
        raise _refusal(path, status, f"only folders of user {os.geteuid()} or of root are used, and no link to one")


def _refusal(path: Path, status: os.stat_result, rule: str) -> PermissionError:
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
    names = f" with {status.st_nlink} names" if stat.S_ISREG(status.st_mode) and status.st_nlink > 1 else ""
    mode = stat.S_IMODE(status.st_mode)
    return PermissionError(f"{shown(path)} is {kind}{names} of user {status.st_uid} with mode {mode:04o}; {rule}")
