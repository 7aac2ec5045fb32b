"""Files of blocks whose transfers end late, fail, or find damaged blocks, at random."""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from dcpmla.cache.disk_file import BlockFile, DamagedBlockError
from dcpmla.cache.disk_files import DiskFiles
from dcpmla.cache.disk_folder import DiskFolder
from dcpmla.cache.disk_transfer import DiskTransfers, Transfer
from dcpmla.cache.host import HostMemory
from dcpmla.cache.tier import Tier
from dcpmla.integrations.offloading import share_content

OpenDisk = Callable[[HostMemory], Tier]
IDENTITY = {"model": "hash", "layout": "one"}


class LateTransfer(Transfer):
    """A transfer that runs when it has been asked a number of times whether it is done."""

    def __init__(self, run: Callable[[], object], num_polls: int) -> None:
        self._run, self._num_polls, self._has_run = run, num_polls, False
        self.has_failed, self.end_time = False, 0.0

    @property
    def is_done(self) -> bool:  # type: ignore[override]
        self._num_polls -= 1
        if self._num_polls < 0 and not self._has_run:
            self._has_run = True
            try:
                self._run()
            except (OSError, DamagedBlockError):
                self.has_failed = True
        return self._has_run


class LateTransfers:
    """Transfers (`DiskTransfers`) of a file in any order. Some fail.

    Args:
        share: Share of transfers that fail.
    """

    def __init__(self, file: Any, rng: Random, num_polls: int, share: float) -> None:
        self.file, self._rng, self._num_polls, self._share = file, rng, num_polls, share
        self.busy: dict[int, LateTransfer] = {}  # the keys are slots

    def read(self, slot: int, key: bytes, pieces: Sequence[memoryview]) -> LateTransfer:
        def run() -> None:
            for piece in pieces:
                piece[:] = bytes([255]) * piece.nbytes
            self._fail()
            self.file.read(slot, key, pieces)

        return self._start(slot, run)

    def write(self, slot: int, key: bytes, pieces: Sequence[memoryview]) -> LateTransfer:
        def run() -> None:
            self._fail()
            self.file.write(slot, key, pieces)

        return self._start(slot, run)

    def close(self) -> None:
        self.file.close()

    def _start(self, slot: int, run: Callable[[], object]) -> LateTransfer:
        before = self.busy.get(slot)
        assert before is None or before._has_run, "two transfers of a slot at a time"
        self.busy[slot] = transfer = LateTransfer(run, self._rng.randint(0, self._num_polls))
        return transfer

    def _fail(self) -> None:
        if self._rng.random() < self._share:
            raise OSError(5, "drawn")


def late_disk(
    directory: Path,
    num_blocks: int,
    seed: int = 0,
    num_polls: int = 3,
    share: float = 0.0,
    rank: int = 0,
    group: Any = None,
) -> OpenDisk:
    """Return a function that gives host memory a file of so many blocks, with late transfers."""

    rng = Random(f"{seed} {rank}")
    return _opener(directory, num_blocks, rank, group, lambda file: LateTransfers(file, rng, num_polls, share))


def threaded_disk(directory: Path, num_blocks: int) -> OpenDisk:
    """Return a function that gives host memory a file of so many blocks, and a quarter as many states, with threads."""
    return _opener(directory, num_blocks, 0, None, DiskTransfers)


def _opener(directory: Path, num_blocks: int, rank: int, group: Any, transfers: Callable[[BlockFile], Any]) -> OpenDisk:
    def open_disk(memory: HostMemory) -> Tier:
        folder = DiskFolder(directory, IDENTITY)
        opened = [BlockFile(folder.claim(rank), num_blocks, memory.block_bytes)]
        if memory.state_bytes:
            opened.append(BlockFile(folder.claim(rank, "states"), num_blocks // 4, memory.state_bytes))
        memory.disk = DiskFiles(*map(transfers, opened))
        return share_content(opened, group)

    return open_disk
