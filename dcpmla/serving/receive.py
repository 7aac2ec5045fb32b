"""Bodies of requests: their receipt, within limits."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from dcpmla.serving.client import Engine
from dcpmla.serving.connections import Limits
from dcpmla.serving.errors import ApiError
from dcpmla.serving.protocol import Body, parse
from dcpmla.serving.worker import CLIENT

_SMALL = 1 << 16  # bytes, parsed in about a millisecond


class Receiver:
    """The door of all routes with bodies: requests count from their arrival until they are submitted."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self._engine, self._limits, self._num_bytes = engine, limits, 0
        self._turn = asyncio.Lock()  # of a large body to be parsed

    @asynccontextmanager
    async def body(self, request: Request, kind: type[Body]) -> AsyncIterator[Body]:
        """Receive and parse a body. It and its request count until the end of the block, right before a submission.

        Raises:
            ApiError: The body is too long, too slow or wrong, or other requests leave no room.
        """
        CLIENT.set(request.client.host if request.client else "")
        content = bytearray()
        try:
            async with self._engine.preparing():
                await self._receive(request, content)
                yield await self._parsed(kind, content)
        finally:
            self._num_bytes -= len(content)

    async def _parsed(self, kind: type[Body], content: bytearray) -> Body:
        """Return a body. Parsing a large one keeps the event loop, so other work has its time before the next one."""
        if len(content) <= _SMALL:
            return parse(kind, content)
        await self._turn.acquire()
        start = time.perf_counter()
        try:
            return parse(kind, content)
        finally:
            asyncio.get_running_loop().call_later(2 * (time.perf_counter() - start), self._turn.release)

    async def _receive(self, request: Request, content: bytearray) -> None:
        self._check_length(int(request.headers.get("content-length", 0)))
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in request.stream():
                    content += part
                    self._num_bytes += len(part)
                    self._check_length(len(content))
        except TimeoutError:
            raise ApiError(408, "the body takes too long", headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise ApiError(400, "the body is not complete") from None

    def _check_length(self, length: int) -> None:
        """Raise ApiError for a body that is too long, or where all bodies together are."""
        if length > self._limits.body_bytes:
            raise ApiError(413, f"the body has more than {self._limits.body_bytes:,} bytes")
        if self._num_bytes > self._limits.total_bytes:
            words = f"requests that are being received have more than {self._limits.total_bytes:,} bytes; try again"
            raise ApiError(503, words, code="overloaded", headers={"Retry-After": "1"})
