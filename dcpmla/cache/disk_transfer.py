"""Threads that read and write blocks on a disk while the engine runs."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Full, Queue
from threading import Lock, Thread

from dcpmla.cache.disk_file import BlockFile

_NUM_READERS = 8  # Fast disks need many reads at a time, and a core computes SHA-256 at 1 to 2 GB/s.
_NUM_WRITERS = 2  # Requests do not wait for writes, so reads get most of the disk.
_MAX_WAITING = 4096  # transfers of a kind, so that a slow disk cannot fill the memory

_logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Transfer:
    """A read or a write of a block.

    Attributes:
        is_done: Whether it has ended, successfully or not. Its memory is in use until then.
        has_failed: Whether the block was not read or written; final once `is_done`.
        end_time: Time of its end, of `time.perf_counter`; final once `is_done`.
    """

    is_done: bool = False
    has_failed: bool = False
    end_time: float = 0.0

    def end(self, has_failed: bool) -> None:
        self.has_failed, self.end_time = has_failed, time.perf_counter()
        self.is_done = True


@dataclass(frozen=True, slots=True)
class _Task:
    move: Callable[[int, bytes, Sequence[memoryview]], None]
    slot: int
    key: bytes
    pieces: Sequence[memoryview]
    transfer: Transfer


class DiskTransfers:
    """Reads and writes of a file's slots by threads, for one caller that never waits for the disk.

    A transfer that cannot be done is a failed one, whatever the reason: an error of the disk, a damaged block, more
    transfers than may wait. Each kind of failure is logged once. The order of transfers is open: before a slot, or
    the memory of a transfer, is used again, the transfer must be done.

    Args:
        file: The file; `close` closes it, too.
    """

    def __init__(self, file: BlockFile) -> None:
        self._file = file
        self._reads, self._writes = (Queue[_Task | None](_MAX_WAITING) for _ in range(2))
        self._is_closed = False
        self._logged: set[str] = set()
        self._log_lock = Lock()
        # A process that fails ends without a wait for the disk, so the threads are daemons.
        threads = {self._reads: _NUM_READERS, self._writes: _NUM_WRITERS}
        self._threads = [
            Thread(target=self._serve, args=(tasks,), name="kv-offloading-disk", daemon=True)
            for tasks, count in threads.items()
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, slot: int, key: bytes, pieces: Sequence[memoryview]) -> Transfer:
        """Start to read a block into memory (`BlockFile.read`); after a failure the memory holds any bytes."""
        return self._submit(self._reads, _Task(self._file.read, slot, key, pieces, Transfer()))

    def write(self, slot: int, key: bytes, pieces: Sequence[memoryview]) -> Transfer:
        """Start to write a block (`BlockFile.write`); after a failure the slot holds no block, or its last."""
        return self._submit(self._writes, _Task(self._file.write, slot, key, pieces, Transfer()))

    def close(self) -> None:
        """Finish all writes, let reads that have not begun fail, and close the file. Later transfers fail."""
        if self._is_closed:
            return
        self._is_closed = True
        for tasks, count in ((self._reads, _NUM_READERS), (self._writes, _NUM_WRITERS)):
            for _ in range(count):
                tasks.put(None)
        for thread in self._threads:
            thread.join()
        try:
            self._file.close()
        except OSError as error:
            self._log("close", error)

    def _submit(self, tasks: "Queue[_Task | None]", task: _Task) -> Transfer:
        if self._is_closed:
            task.transfer.end(has_failed=True)
            return task.transfer
        try:
            tasks.put_nowait(task)
        except Full:
            self._log(task.move.__name__, Full(f"more than {_MAX_WAITING} transfers wait"))
            task.transfer.end(has_failed=True)
        return task.transfer

    def _serve(self, tasks: "Queue[_Task | None]") -> None:
        while (task := tasks.get()) is not None:
            has_failed = True
            try:
                if tasks is self._writes or not self._is_closed:
                    task.move(task.slot, task.key, task.pieces)
                    has_failed = False
            except Exception as error:  # Whatever it is, the block is a miss and the engine goes on.
                self._log(task.move.__name__, error)
            task.transfer.end(has_failed)
            del task  # The thread holds no memory while it waits for the next one.

    def _log(self, action: str, error: Exception) -> None:
        kind = f"{action} {type(error).__name__} {getattr(error, 'errno', '')}"
        with self._log_lock:
            if kind in self._logged:
                return
            self._logged.add(kind)
        _logger.warning(
            "%s of a block on the disk of --kv-offloading-path: %s; such blocks count as misses, and further ones of "
            "this kind are not logged",
            action,
            str(error),  # The error itself refers to the memory of the transfer.
        )
