"""Folders of blocks on local disks: one for each identity of a cache, one file of blocks for each rank and job.

    DIR/<SHA-256 of the identity>/identity.json      the identity, to be read by people
    DIR/<SHA-256 of the identity>/rank3.0.blocks     the blocks of rank 3, generation 0
    DIR/<SHA-256 of the identity>/rank3.0.index      their records (`disk_file.py`)
    DIR/<SHA-256 of the identity>/states3.0.blocks   the states of rank 3, in caches with states; likewise

A job holds an exclusive lock on each of its files. A second job with the same identity finds them locked and takes
the next generation: a server can start while its predecessor still finishes requests, and a process that hangs cannot
keep others from starting. Files without a lock are either reused or removed, also files of other identities, so a
directory never holds more than --kv-offloading-disk-size for each running job. The lock ends with its process.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

_BLOCKS, _INDEX = ".blocks", ".index"


@dataclass(frozen=True)
class ClaimedFile:
    """A file of blocks that this process has locked.

    Args:
        blocks: Path of the blocks; the lock is on this file.
        index: Path of the records.
        lock: Descriptor of `blocks`, for reads and writes through the page cache. The lock ends when it is closed.
        owner: Digest of the identity and the rank. Records of other owners do not pass for records of this file.
    """

    blocks: Path
    index: Path
    lock: int
    owner: bytes


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
        self.path = directory / self._digest
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.others = [other for path, other in _folders(directory) if path != self.path and _has_blocks(path)]
            written = self.path / f"identity.{os.getpid()}"
            written.write_text(json.dumps(dict(identity), indent=2, sort_keys=True) + "\n")
            written.replace(self.path / "identity.json")
        except OSError as error:
            raise _path_error(directory, error) from error

    def claim(self, rank: int, content: str = "rank") -> ClaimedFile:
        """Lock a file of a rank: the newest generation that no process holds, or a new one.

        Other files that no process holds are removed: of this rank and content, and of all ranks of other identities.

        Args:
            content: Content of the file, "rank" for blocks or "states".

        Raises:
            ValueError: The files cannot be made or locked.
        """
        try:
            lock, path = self._lock_generation(f"{content}{rank}")
            for folder, _ in _folders(self._directory):
                if folder != self.path:
                    _remove_unlocked(folder.glob(f"*{_BLOCKS}"))
        except OSError as error:
            raise _path_error(self._directory, error) from error
        owner = sha256(f"{self._digest} {content} {rank}".encode()).digest()
        return ClaimedFile(path, path.with_suffix(_INDEX), lock, owner)

    def _lock_generation(self, name: str) -> tuple[int, Path]:
        while True:
            paths = self.path.glob(f"{name}.*{_BLOCKS}")
            generations = sorted(int(path.name.split(".")[1]) for path in paths)
            existing = [self.path / f"{name}.{generation}{_BLOCKS}" for generation in reversed(generations)]
            for path in existing:
                if (lock := _lock(path)) is not None:
                    _remove_unlocked(existing)  # The lock keeps the file itself.
                    return lock, path
            path = self.path / f"{name}.{max(generations, default=-1) + 1}{_BLOCKS}"
            if (lock := _lock(path, os.O_CREAT)) is not None:
                return lock, path
            # Another job has made this file since: look again.


def _digest(identity: Mapping[str, str]) -> str:
    return sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()


def _folders(directory: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield all folders of blocks with their identities. Other folders do not match their names."""
    for path in sorted(directory.iterdir()):
        if re.fullmatch(r"[0-9a-f]{64}", path.name):
            try:
                identity = json.loads((path / "identity.json").read_text())
            except (OSError, ValueError):
                continue
            if isinstance(identity, dict) and _digest(identity) == path.name:
                yield path, identity


def _has_blocks(folder: Path) -> bool:
    return any(folder.glob(f"*{_BLOCKS}"))


def _lock(path: Path, flags: int = 0) -> int | None:
    """Open and lock a file; None if another descriptor has locked it, or if it does not exist (any more)."""
    try:
        descriptor = os.open(path, os.O_RDWR | flags, mode=0o600)
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


def _remove_unlocked(paths: Iterator[Path] | list[Path]) -> None:
    """Remove files of blocks that no process holds, each under its lock, so that no process takes it meanwhile."""
    for path in paths:
        if (lock := _lock(path)) is not None:
            path.with_suffix(_INDEX).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            os.close(lock)


def _path_error(directory: Path, error: OSError) -> ValueError:
    return ValueError(
        f"kv_offloading_path (--kv-offloading-path) is {directory}: {error}; it must be a directory on a local disk "
        "in which this user can make, lock and write files"
    )
