"""Limits of one client: a connection always has a deadline and a budget of bytes, whatever its state."""

import asyncio
import resource
from dataclasses import dataclass, replace
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_NUM_HEADERS = 256
_READ_BYTES = 256 << 10  # A client that reads this much of an answer gets `send_seconds` again.
_OTHER_FILES = 64  # Files of the process that are no connections.


@dataclass(frozen=True)
class Limits:
    """Limits of what a client sends, and of the time that it takes.

    Attributes:
        head_bytes: Bytes between two pieces of bodies: the head of a request, a chunk's frame, trailers.
        head_seconds: Time from a connection's start, or from an answer, to the end of the next head.
        body_bytes: Length of a body.
        body_seconds: Time from a head to the end of its body.
        total_bytes: Length of all bodies together that are being received or tokenized.
        send_seconds: Time without progress of a client that has an answer to read.
        num_connections: Connections at the same time; more are closed at once.
    """

    head_bytes: int = 64 << 10
    head_seconds: float = 30.0
    body_bytes: int = 16 << 20  # A prompt of a million token ids has half as many.
    body_seconds: float = 60.0
    total_bytes: int = 256 << 20
    send_seconds: float = 60.0
    num_connections: int = 1 << 14


def limit_connections(limits: Limits) -> Limits:
    """Let this process open a file for each connection; return the limits with as many connections as it may open."""
    num_files, (_, hard) = limits.num_connections + _OTHER_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        num_files = min(num_files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    return replace(limits, num_connections=max(1, num_files - _OTHER_FILES))


class Connection(HttpToolsProtocol):
    """uvicorn's connection within limits; it is aborted where the client exceeds one.

    Args:
        limits: Limits of the client.
        request_timeout: Seconds that the application may take for an answer.
    """

    def __init__(self, *args: Any, limits: Limits, request_timeout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits, self._request_timeout = limits, request_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._num_unread = 0  # Bytes of an answer at the timer's start.
        self._budget = limits.head_bytes
        self._num_body_bytes = 0
        self._is_in_head = True

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()
        if len(self.connections) > self._limits.num_connections:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._budget -= len(data)
        super().data_received(data)
        if self._budget < 0:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_body_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= _NUM_HEADERS:
            self.transport.abort()
        elif self._is_in_head:  # Trailers are dropped.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head, self._budget = False, self._limits.head_bytes
        if self._is_answering:
            # Common clients do not pipeline. uvicorn would queue the request, stop reading, and therefore not notice
            # when the client of the running request goes away.
            self.transport.abort()
            return
        super().on_headers_complete()
        if self.expect_100_continue:
            # After an error the client may send its body or not, so no request can follow.
            self.cycle.keep_alive = False
        self._start_timer()

    def on_body(self, body: bytes) -> None:
        self._budget = self._limits.head_bytes
        self._num_body_bytes += len(body)
        # The application refuses a body that is too long. Most of it is read nevertheless (and dropped): a client that
        # is still sending when its connection closes may not see the answer.
        if self._num_body_bytes > 4 * self._limits.body_bytes:
            self.transport.abort()
        elif not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._start_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._start_timer()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        """Start the time of the state that the connection is in."""
        if self._timer is not None:
            self._timer.cancel()
        self._num_unread = self.transport.get_write_buffer_size()
        if self.flow.write_paused:
            seconds = self._limits.send_seconds
        elif not self._is_answering:
            seconds = self._limits.head_seconds
        elif self.cycle.more_body:
            # The application answers 408 before.
            seconds = self._limits.body_seconds + self._limits.send_seconds
        else:
            seconds = self._request_timeout + self._limits.send_seconds
        self._timer = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        if self._num_unread - self.transport.get_write_buffer_size() >= _READ_BYTES:
            self._start_timer()
        else:
            self.transport.abort()
