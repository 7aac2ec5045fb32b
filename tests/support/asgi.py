"""A client of an application in this process, which may leave before its answer."""

import asyncio
from typing import Any


class Client:
    """A client that sends a body at once, and leaves when told to."""

    def __init__(self, app: Any, path: str, body: bytes, key: str = "") -> None:
        self.status, self._left = 0, asyncio.Event()
        self._messages = [{"type": "http.request", "body": body, "more_body": False}]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "http_version": "1.1"}
        headers = [(b"authorization", f"Bearer {key}".encode())]
        self.task = asyncio.create_task(app({**scope, "headers": headers}, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._messages:
            return self._messages.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)

    async def leave(self) -> None:
        """Leave, and wait until the application has noticed it."""
        self._left.set()
        await self.task
