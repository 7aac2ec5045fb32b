"""Commands of the HTTP process to the first rank, within a limit of bytes between the two."""

from asyncio import StreamWriter
from collections.abc import Collection

from dcpmla.serving.messages import Abort, Command, Submit, pack

WINDOW = 4 << 20  # Bytes that are sent before the ranks take them, one command more than that at most.


class Outbox:
    """Commands in the order of their submission.

    A submission waits here, where an abort removes it, while the ranks have not taken WINDOW bytes of commands before
    it: they take commands once a step. So bytes that belong to no open request do not pile up on the way.
    """

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._waiting: dict[int, Submit] = {}  # first request's id -> submission, oldest first
        self._num_sent = self._num_taken = 0  # bytes

    def submit(self, command: Submit) -> None:
        """Send a submission as soon as the limit allows."""
        self._waiting[command.request_ids[0]] = command
        self._send_waiting()

    def abort(self, request_ids: Collection[int]) -> None:
        """Abort unfinished requests. A submission that was not sent is dropped: none of its requests is finished, so
        they are aborted together.
        """
        dropped: set[int] = set()
        for first in request_ids:
            if first in self._waiting:
                dropped.update(self._waiting.pop(first).request_ids)
        if sent := [request_id for request_id in request_ids if request_id not in dropped]:
            self.send(Abort(sent))

    def take(self, num_bytes: int) -> None:
        """Continue after the ranks' report of the bytes that they took since the start."""
        self._num_taken = num_bytes
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and self._num_sent - self._num_taken < WINDOW:
            self.send(self._waiting.pop(next(iter(self._waiting))))

    def send(self, command: Command) -> None:
        """Send a command at once. Submissions wait in `submit`."""
        packed = pack(command)
        self._num_sent += len(packed)
        self._writer.write(packed)
