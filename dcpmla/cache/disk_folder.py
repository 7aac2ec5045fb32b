"""Folders of blocks on local disks: one for each identity of a cache, one file of blocks for each rank and job.

    DIR/<SHA-256 of the identity>/identity.json      the identity, to be read by people
    DIR/<SHA-256 of the identity>/rank3.0.blocks     the blocks of rank 3, generation 0
    DIR/<SHA-256 of the identity>/rank3.0.index      their records (`disk_file.py`)
    DIR/<SHA-256 of the identity>/states3.0.blocks   the states of rank 3, in caches with states; likewise

A job holds an exclusive lock on each of its files. A second job with the same identity finds them locked and takes
the next generation: a server can start while its predecessor still finishes requests, and a process that hangs cannot
keep others from starting. Files without a lock are either reused or removed, also files of other identities, so a
directory never holds more than --kv-offloading-disk-size for each running job. The lock ends with its process.

Folders and files are this user's alone (`own_folder.py`), wherever DIR is; everything else is refused.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from dcpmla.cache.own_folder import OwnFolder

_BLOCKS, _INDEX = ".blocks", ".index"
_NAME = re.compile(r"([a-z]+\d+)\.(0|[1-9]\d{0,8})\.blocks")  # content and rank, generation


@dataclass(frozen=True)
class ClaimedFile:
    """A file of blocks that this process has locked.

    Args:
        folder: Folder of the files.
        name: Name of the blocks; the lock is on this file.
        lock: Descriptor of the blocks, for reads and writes through the page cache. The lock ends when it is closed.
        owner: Digest of the identity and the rank. Records of other owners do not pass for records of this file.
    """

    folder: OwnFolder
    name: str
    lock: int
    owner: bytes

    @property
    def blocks(self) -> Path:
        """Path of the blocks."""
        return self.folder.path / self.name

    @property
    def index(self) -> Path:
        """Path of the records."""
        return self.blocks.with_suffix(_INDEX)

    def open_index(self) -> int:
        """Open the records, made if they are not there.

        Raises:
            ValueError: What is there is no file of this user alone.
        """
        try:
            try:
                return self.folder.open(self.index.name, os.O_RDWR)
            except FileNotFoundError:
                return self.folder.open(self.index.name, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise _path_error(self.folder.path.parent, error) from error

    def open_direct(self) -> int:
        """Open the blocks once more, for reads and writes that bypass the page cache.

        Raises:
            OSError: The file system has none, or another file has the name now.
        """
        descriptor = self.folder.open(self.name, os.O_RDWR | os.O_DIRECT)
        if not os.path.samestat(os.fstat(descriptor), os.fstat(self.lock)):
            os.close(descriptor)
            raise FileNotFoundError(self.blocks)
        return descriptor

    def remove(self) -> None:
        """Remove the files. The lock stays until it is closed."""
        self.folder.remove(self.index.name)
        self.folder.remove(self.name)


class DiskFolder:
    """A folder for the blocks of one identity.

    Construct it on all ranks before a rank calls `claim`, which removes what `others` reports.

    Args:
        directory: Path of --kv-offloading-path, made if it does not exist. Its other contents are not touched.
        identity: Names and values of everything on which the bytes of a block depend: digest of the model, format of
            the cache, layout over ranks.
    Attributes:
        others: Other identities for which the directory holds blocks. This cache cannot use them.
    Raises:
        ValueError: The directory cannot be made or written.
    """

    def __init__(self, directory: Path, identity: Mapping[str, str]) -> None:
        self._directory, self._digest = directory, _digest(identity)
        try:
            self._folder = OwnFolder(directory / self._digest)
            self.others = [
                other for path, other in _folders(directory) if path != self.path and _has_blocks(OwnFolder(path))
            ]
            self._folder.write("identity.json", json.dumps(dict(identity), indent=2, sort_keys=True) + "\n")
        except OSError as error:
            raise _path_error(directory, error) from error

    @property
    def path(self) -> Path:
        """Path of the folder of this identity."""
        return self._folder.path

    def claim(self, rank: int, content: str = "rank") -> ClaimedFile:
        """Lock a file of a rank: the newest generation that no process holds, or a new one.

        Other files that no process holds are removed: of this rank and content, and of all ranks of other identities.

        Args:
            content: Content of the file, "rank" for blocks or "states".

        Raises:
            ValueError: The files cannot be made or locked.
        """
        try:
            lock, name = self._lock_generation(f"{content}{rank}")
            for path, _ in _folders(self._directory):
                if path != self.path:
                    other = OwnFolder(path)
                    _remove_unlocked(other, [each for each in other.names() if _NAME.fullmatch(each)])
        except OSError as error:
            raise _path_error(self._directory, error) from error
        owner = sha256(f"{self._digest} {content} {rank}".encode()).digest()
        return ClaimedFile(self._folder, name, lock, owner)

    def _lock_generation(self, name: str) -> tuple[int, str]:
        while True:
            found = filter(None, map(_NAME.fullmatch, self._folder.names()))
            generations = sorted((int(each[2]) for each in found if each[1] == name), reverse=True)
            existing = [f"{name}.{generation}{_BLOCKS}" for generation in generations]
            for each in existing:
                if (lock := _lock(self._folder, each)) is not None:
                    _remove_unlocked(self._folder, existing)  # The lock keeps the file itself.
                    return lock, each
            new = f"{name}.{max(generations, default=-1) + 1}{_BLOCKS}"
            if (lock := _lock(self._folder, new, os.O_CREAT)) is not None:
                return lock, new
            # Another job has made this file since: look again.


def _digest(identity: Mapping[str, str]) -> str:
    return sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()


def _folders(directory: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield all folders of blocks of this user with their identities. Other folders do not match their names."""
    for path in sorted(directory.iterdir()):
        if re.fullmatch(r"[0-9a-f]{64}", path.name):
            try:
                identity = json.loads(OwnFolder(path).read("identity.json"))
            except (OSError, ValueError):
                continue
            if isinstance(identity, dict) and _digest(identity) == path.name:
                yield path, identity


def _has_blocks(folder: OwnFolder) -> bool:
    return any(map(_NAME.fullmatch, folder.names()))


def _lock(folder: OwnFolder, name: str, flags: int = 0) -> int | None:
    """Open and lock a file; None if another descriptor has locked it, or if it does not exist (any more).

    With O_CREAT, None if it exists by now.
    """
    try:
        descriptor = folder.open(name, os.O_RDWR | flags)
    except (FileNotFoundError, FileExistsError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except BlockingIOError:
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _remove_unlocked(folder: OwnFolder, names: list[str]) -> None:
    """Remove files of blocks that no process holds, each under its lock, so that no process takes it meanwhile."""
    for name in names:
        if (lock := _lock(folder, name)) is not None:
            ClaimedFile(folder, name, lock, b"").remove()
            os.close(lock)


def _path_error(directory: Path, error: OSError) -> ValueError:
    return ValueError(
        f"kv_offloading_path (--kv-offloading-path) is {directory}: {error}; it must be a directory on a local disk "
        "in which this user can make, lock and write files; what it has there must be this user's alone: directories "
        "of mode 0700, files of mode 0600, no links"
    )
