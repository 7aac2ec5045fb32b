"""A process that runs functions for the HTTP process, each in a child of its own with limits of time and memory.

What clients send may make a function slow or large. Its child then ends, and nothing else: the event loop never waits,
and a function whose client has gone is ended, too. The process is forked before the HTTP process has threads, has one
itself, and so shares all imported modules with its children.
"""

import asyncio
import gc
import inspect
import json
import os
import resource
import select
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any, get_type_hints
from weakref import WeakValueDictionary

import msgspec

from dcpmla.serving.forks import fork
from dcpmla.serving.messages import LENGTH

MAX_CHILDREN = 4  # at once; one client has all but one of them at most, so that others find one free
CLIENT: ContextVar[str] = ContextVar("client", default="")  # address of the client whose request a task works on
_MODEL, _FUNCTION = b"m", b"f"  # purposes of a socket that is passed to the process
_NICE = 10  # Where processors are few, steps of the engine and answers to other clients go first.
_CONTROL = 3  # the process's only file besides the standard ones


class LimitError(Exception):
    """The end of a function that has passed a limit."""


@dataclass(frozen=True)
class Allowance:
    """Limits of one function.

    Attributes:
        cpu_seconds: Time of processors.
        seconds: Duration from its start on, for a machine that is busy with other work.
        num_bytes: Memory of its child beyond the process's own.
        answer_bytes: Length of its answer as JSON.
    """

    cpu_seconds: float = 1.0
    seconds: float = 20.0
    num_bytes: int = 512 << 20
    answer_bytes: int = 1 << 20


class Permits:
    """Permits to work. Each client gets them in the order of its requests, but one client never has all."""

    def __init__(self, num_permits: int) -> None:
        self._all, self._num_of_client = asyncio.Semaphore(num_permits), max(1, num_permits - 1)
        self._of_clients = WeakValueDictionary[str, asyncio.Semaphore]()  # of clients that have permits, or wait

    async def take(self) -> Callable[[], None]:
        """Wait for a permit of this task's client; return the function that gives it back."""
        own = self._of_clients.setdefault(CLIENT.get(), asyncio.Semaphore(self._num_of_client))
        await own.acquire()
        try:
            await self._all.acquire()
        except asyncio.CancelledError:
            own.release()
            raise

        def give_back() -> None:
            own.release()
            self._all.release()

        return give_back


class Call(msgspec.Struct):
    """A function for a child of the process.

    Attributes:
        module, name: Names of the function's module and of the function, whose first argument is the prepared model.
        args: JSON of a list of further arguments, of the types that the function declares.
    """

    allowance: Allowance
    module: str
    name: str
    args: msgspec.Raw


_ALLOWANCE = Allowance()


class Worker:
    """The process, as the HTTP process knows it.

    Args:
        prepare: Function that the process itself runs on the model of its calls, and whose result functions get first.
            It declares the model's type.
    """

    def __init__(self, prepare: Callable[[Any], Any]) -> None:
        self._prepare = prepare
        self._control: socket.socket | None = None
        self._pid = 0
        self._permits = Permits(MAX_CHILDREN)
        self._packing = asyncio.Lock()  # of the arguments of a function, which may be large
        self._ready: asyncio.Future[bytes] | None = None  # the answer to the model

    def start(self) -> None:
        """Fork the process, unless it runs. If one was killed, another follows and is given the model again."""
        if self._control is not None and os.waitpid(self._pid, os.WNOHANG)[0]:
            self._control.close()
            self._control = self._ready = None
        if self._control is None:
            self._control, theirs = socket.socketpair()
            self._pid = fork(partial(_run, theirs, self._prepare))
            theirs.close()

    async def call(
        self, model: Any, function: Callable[..., Any], *args: Any, allowance: Allowance = _ALLOWANCE
    ) -> Any:
        """Return what a function of a module returns for the prepared model and arguments, as JSON has it.

        The function's child is ended when this coroutine is cancelled.

        Args:
            model: Argument of `prepare`, the same in all calls.
            allowance: Limits of the function.
        Raises:
            LimitError: The function has passed a limit.
        """
        give_back = await self._permits.take()
        try:
            self.start()
            if self._ready is None:
                self._ready = asyncio.ensure_future(self._exchange(_MODEL, msgspec.json.encode([model]), None))
            await asyncio.shield(self._ready)  # The first caller may leave before it.
            async with self._packing:
                await asyncio.sleep(0)
                values = msgspec.Raw(msgspec.json.encode(args))
                body = msgspec.json.encode(Call(allowance, function.__module__, function.__name__, values))
            answer = await self._exchange(_FUNCTION, body, allowance)
        finally:
            give_back()
        return json.loads(answer)

    async def _exchange(self, purpose: bytes, body: bytes, allowance: Allowance | None) -> bytes:
        """Return the answer to a message, over a socket of its own."""
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [purpose], [theirs.fileno()])
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(None if allowance is None else allowance.seconds):
                writer.writelines([LENGTH.pack(len(body)), body])
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if allowance is not None and length > allowance.answer_bytes:
                    raise LimitError("its answer is too large")
                return await reader.readexactly(length)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            raise LimitError("it takes too much time or memory") from error
        finally:
            writer.transport.abort()


def _run(theirs: socket.socket, prepare: Callable[[Any], Any]) -> None:
    """Start a child for each function, and end it when the other end of its socket is closed; end with the other end of
    the process's own socket.
    """
    gc.freeze()  # The HTTP process's files are closed below: no object of theirs may close a number again.
    os.dup2(theirs.fileno(), _CONTROL)
    os.closerange(_CONTROL + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    control, model = socket.socket(fileno=_CONTROL), None
    children = dict[int, tuple[int, socket.socket]]()  # process id and socket, by the file that shows a child's end
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for number, event in poll.poll():
            if number == control.fileno():
                purpose, files, _, _ = socket.recv_fds(control, 1, 1)
                if not purpose:
                    for pid, _ in children.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                channel = socket.socket(fileno=files[0])
                if purpose == _MODEL:
                    model = prepare(*_arguments(prepare, _receive(channel)))
                    _answer(channel, None)
                    channel.close()
                    continue
                pid = fork(partial(_child, channel, model))
                child = os.pidfd_open(pid)
                children[child] = pid, channel
                poll.register(child, select.POLLIN)
                poll.register(channel, 0)  # Only the other end's end is of interest; the child reads.
            elif number in children:
                pid, channel = children.pop(number)
                os.waitpid(pid, 0)
                poll.unregister(number)
                poll.unregister(channel)
                os.close(number)
                channel.close()
            elif event & select.POLLHUP:
                for pid, channel in children.values():
                    if channel.fileno() == number:
                        os.kill(pid, signal.SIGKILL)


def _child(channel: socket.socket, model: Any) -> None:
    """Run the function that comes over a socket, within limits, and answer."""
    with suppress(MemoryError, ConnectionError):  # The caller sees the end, or has gone.
        with open("/proc/self/statm") as sizes:
            own = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(_NICE)
        call = msgspec.json.decode(_receive(channel), type=Call)
        function = getattr(import_module(call.module), call.name)
        args = _arguments(function, call.args, start=1)
        resource.setrlimit(resource.RLIMIT_AS, (own + call.allowance.num_bytes,) * 2)
        signal.setitimer(signal.ITIMER_PROF, call.allowance.cpu_seconds)  # Its signal ends the process.
        _answer(channel, function(model, *args))


def _answer(channel: socket.socket, value: Any) -> None:
    """Send a value as JSON."""
    body = json.dumps(value).encode()
    channel.sendall(LENGTH.pack(len(body)) + body)


def _receive(channel: socket.socket) -> bytes:
    """Return the JSON that comes over a socket."""
    with channel.makefile("rb") as stream:
        (length,) = LENGTH.unpack(stream.read(LENGTH.size))
        return stream.read(length)


def _arguments(function: Callable[..., Any], values: msgspec.Raw | bytes, start: int = 0) -> Sequence[Any]:
    """Return the values of a JSON list as the types of a function's parameters, from number `start` on.

    Raises:
        ValueError: A value has another type, or there are too many or too few.
    """
    types = get_type_hints(function)
    names = islice(inspect.signature(function).parameters, start, None)
    return msgspec.json.decode(values, type=tuple[tuple(types[name] for name in names)])  # type: ignore[misc]
