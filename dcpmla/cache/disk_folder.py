"""Folders of blocks on local disks: one for each identity of a cache, one file of blocks for each rank and job.

    DIR/<SHA-256 of the identity>/identity.json      the identity, to be read by people
    DIR/<SHA-256 of the identity>/rank3.0.blocks     the blocks of rank 3, generation 0
    DIR/<SHA-256 of the identity>/rank3.0.index      their records (`disk_file.py`)
    DIR/<SHA-256 of the identity>/states3.0.blocks   the states of rank 3, in caches with states; likewise

A job holds an exclusive lock on each of its files. A second job with the same identity finds them locked and takes
the next generation: a server can start while its predecessor still finishes requests, and a process that hangs cannot
keep others from starting. Files without a lock are either reused or removed, also files of other identities, so a
directory never holds more than --kv-offloading-disk-size for each running job. The lock ends with its process.

The folder of an identity and its files belong to this user and are closed to others, or the job is refused. They are
opened, listed and removed through the folder's descriptor, which is held from its making on (`own_files.py`). DIR may
be shared: folders of other users are not touched. A user who can rename folders in DIR, or DIR itself, can take the
cache away from the next job, but a running job keeps its folder, and the next one refuses a folder that another user
made.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from dcpmla.own_files import OwnFolder, open_place, shown

_BLOCKS, _INDEX, _IDENTITY = ".blocks", ".index", "identity.json"
_FILE = re.compile(r"[a-z]+(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(blocks|index)")
_OTHERS_WRITE = 0o002  # refuses identity.json; earlier versions made it with the mode of the umask


@dataclass(frozen=True)
class ClaimedFile:
    """A file of blocks that this process has locked.

    Args:
        folder: Folder of both files.
        blocks: Path of the blocks; the lock is on this file.
        lock: Descriptor of `blocks`. The lock ends when it is closed.
        index: Descriptor of the records.
        owner: Digest of the identity and the rank. Records of other owners do not pass for records of this file.
    """

    folder: OwnFolder
    blocks: Path
    lock: int
    index: int
    owner: bytes

    def remove(self) -> None:
        """Remove the names of both files; their descriptors can be used as before."""
        _remove(self.folder, self.blocks.name)


class DiskFolder:
    """A folder for the blocks of one identity.

    Construct it on all ranks before a rank calls `claim`, which removes what `others` reports.

    Args:
        directory: Path of --kv-offloading-path, made if it does not exist. Its other contents are not touched.
        identity: Names and values of everything on which the bytes of a block depend: digest of the model, format of
            the cache, layout over ranks.
    Attributes:
        path: Path of the folder.
        others: Other identities for which the directory holds blocks. This cache cannot use them.
    Raises:
        ValueError: The directory cannot be made or written, or the folder or one of its files is not this user's own.
    """

    def __init__(self, directory: Path, identity: Mapping[str, str]) -> None:
        self._directory, self._digest = directory, _digest(identity)
        self.path = directory / self._digest
        try:
            self._place = open_place(directory)
            self._folder = self._place.open_folder(self._digest, makes=True)
            _check_files(self._folder)
            _write_identity(self._folder, identity)
            self.others = [other for folder, other in self._other_folders() if any(_blocks_in(folder))]
        except (OSError, ValueError) as error:
            raise _path_error(directory, error) from error

    def claim(self, rank: int, content: str = "rank") -> ClaimedFile:
        """Lock a file of a rank: the newest generation that no process holds, or a new one.

        Other files that no process holds are removed: of this rank and content, and of all ranks of other identities.

        Args:
            content: Content of the file, "rank" for blocks or "states".

        Raises:
            ValueError: The files cannot be made or locked, or are not this user's own.
        """
        try:
            lock, name = self._lock_generation(f"{content}{rank}")
            try:
                index = self._folder.open_file(_index_of(name), os.O_RDWR | os.O_CREAT)
            except BaseException:
                os.close(lock)
                raise
            for folder, _ in self._other_folders():
                _remove_unlocked(folder, _blocks_in(folder))
        except (OSError, ValueError) as error:
            raise _path_error(self._directory, error) from error
        owner = sha256(f"{self._digest} {content} {rank}".encode()).digest()
        return ClaimedFile(self._folder, self.path / name, lock, index, owner)

    def _lock_generation(self, name: str) -> tuple[int, str]:
        while True:
            names = [each for each in _blocks_in(self._folder) if each.startswith(f"{name}.")]
            generations = sorted(int(each.split(".")[1]) for each in names)
            existing = [f"{name}.{generation}{_BLOCKS}" for generation in reversed(generations)]
            for each in existing:
                if (lock := _lock(self._folder, each)) is not None:
                    _remove_unlocked(self._folder, existing)  # The lock keeps the file itself.
                    return lock, each
            new = f"{name}.{max(generations, default=-1) + 1}{_BLOCKS}"
            if (lock := _lock(self._folder, new, os.O_CREAT)) is not None:
                return lock, new
            # Another job has made this file since: look again.

    def _other_folders(self) -> Iterator[tuple[OwnFolder, dict[str, str]]]:
        """Yield this user's folders of other identities. What else the directory holds does not match its name."""
        for name in self._place.names():
            if name != self._digest and re.fullmatch(r"[0-9a-f]{64}", name):
                try:
                    folder = self._place.open_folder(name)
                    identity = _read_identity(folder)
                except (OSError, ValueError):
                    continue
                if isinstance(identity, dict) and _digest(identity) == name:
                    yield folder, identity


def _digest(identity: Mapping[str, str]) -> str:
    return sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()


def _check_files(folder: OwnFolder) -> None:
    """Raise an error if a file of the folder, of any rank, is not this user's own or has an odd name."""
    for name in folder.names():
        if name.endswith((_BLOCKS, _INDEX)):
            folder.check_file(name)
            if not _FILE.fullmatch(name):
                raise ValueError(f"{shown(folder.path / name)} has another name than files of ranks: rank3.0{_BLOCKS}")


def _write_identity(folder: OwnFolder, identity: Mapping[str, str]) -> None:
    """Write the identity in place. All ranks write the same bytes, so that their order does not matter."""
    descriptor = folder.open_file(_IDENTITY, os.O_WRONLY | os.O_CREAT, _OTHERS_WRITE)
    with open(descriptor, "wb") as file:
        file.write((json.dumps(dict(identity), indent=2, sort_keys=True) + "\n").encode())
        file.truncate()


def _read_identity(folder: OwnFolder) -> object:
    with open(folder.open_file(_IDENTITY, os.O_RDONLY, _OTHERS_WRITE), "rb") as file:
        return json.loads(file.read())


def _blocks_in(folder: OwnFolder) -> list[str]:
    return [name for name in folder.names() if name.endswith(_BLOCKS) and _FILE.fullmatch(name)]


def _index_of(blocks: str) -> str:
    return blocks.removesuffix(_BLOCKS) + _INDEX


def _lock(folder: OwnFolder, name: str, flags: int = 0) -> int | None:
    """Open and lock a file; None if another descriptor has locked it, or if it does not exist (any more)."""
    try:
        descriptor = folder.open_file(name, os.O_RDWR | flags)
    except FileNotFoundError:
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


def _remove_unlocked(folder: OwnFolder, names: Iterable[str]) -> None:
    """Remove files of blocks that no process holds, each under its lock, so that no process takes it meanwhile.

    Files of other users are kept.
    """
    for name in names:
        with suppress(PermissionError):
            if (lock := _lock(folder, name)) is not None:
                try:
                    _remove(folder, name)
                finally:
                    os.close(lock)


def _remove(folder: OwnFolder, blocks: str) -> None:
    folder.remove_file(_index_of(blocks))
    folder.remove_file(blocks)


def _path_error(directory: Path, error: Exception) -> ValueError:
    return ValueError(
        f"kv_offloading_path (--kv-offloading-path) is {shown(directory)}: {error}; it must be a directory on a local "
        "disk in which this user can make, lock and write files, with no links or other users' files among them"
    )
