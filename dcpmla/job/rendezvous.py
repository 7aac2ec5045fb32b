"""The ranks' meeting before there are process groups: connecting to one store in time, and sharing mistakes over it."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist

from dcpmla.job.identity import StrangerError
from dcpmla.job.launch_info import LaunchInfo

_GRACE = 5.0  # seconds past the timeout, for the store's client to report it first
_RETRY = 0.5  # seconds between two look-ups of a host name


def listen_for_ranks(host: str, port: int = 0) -> socket.socket:
    """Listen on one address, if the others' name for this host is an address; otherwise on all of this host.

    Args:
        host: Name or address at which the others reach this host.
        port: Port; 0 takes one that is free.
    Raises:
        OSError: The port is taken, or not allowed.
    """
    with suppress(ValueError, OSError):  # a name, or an address that a router translates
        family = socket.AF_INET6 if ip_address(host).version == 6 else socket.AF_INET
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def meet(launch: LaunchInfo, timeout: timedelta) -> dist.Store:
    """Connect to the store where the job's ranks meet.

    Raises:
        ConnectionError: The ranks did not meet in time, or met another job's; rank 0's port is taken.
    """
    outcome: Future[dist.Store] = Future()
    # In a thread, because the store's client waits forever for a listener that is not a store and never answers.
    threading.Thread(target=_open, args=(launch, timeout, outcome), daemon=True).start()
    try:
        return outcome.result(timeout.total_seconds() + _GRACE)
    except TimeoutError:
        error: Exception = ConnectionError(
            f"what listens at {_address(launch)} is not rank 0, or is stopped: set another MASTER_PORT"
        )
    except StrangerError as stranger:
        raise StrangerError(f"{_name(launch)}, at {_address(launch)}: {stranger}") from stranger
    except (dist.DistError, OSError) as caught:
        if (reason := _cannot_listen(caught)) and launch.address:
            raise ConnectionError(
                f"{_name(launch)} cannot listen at port {launch.address[1]} of its host: {reason}; set MASTER_PORT "
                "(torchrun: --master-port) to a free port, the same for all ranks"
            ) from caught
        error = caught
    reason = (str(error).splitlines() or [repr(error)])[0]
    raise ConnectionError(
        f"{_name(launch)} did not meet the others within {timeout.total_seconds():.0f} s: {reason}; see that all ranks "
        "were started and reach rank 0's host (MASTER_ADDR, MASTER_PORT)"
    ) from error


def _open(launch: LaunchInfo, timeout: timedelta, outcome: Future[dist.Store]) -> None:
    try:
        _resolve(launch, time.monotonic() + timeout.total_seconds())
        outcome.set_result(launch.open_store(timeout))
    except Exception as error:
        outcome.set_exception(error)


def _resolve(launch: LaunchInfo, until: float) -> None:
    """Look up rank 0's host until it resolves; torch would print its stack for each failed attempt."""
    while launch.address:
        try:
            socket.getaddrinfo(*launch.address)
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() > until:
                raise ConnectionError(
                    f"the host name {launch.address[0]!r} does not resolve here ({error}): set MASTER_ADDR"
                ) from error
            time.sleep(_RETRY)
        else:
            return


def _cannot_listen(error: Exception) -> str | None:
    """Return the system's reason why torch's store cannot listen at its port; None for another error."""
    match = re.search(r"failed to listen .*name: (\w+), message: ([^\n.]+)", str(error), re.DOTALL)
    return f"{match[2]} ({match[1]})" if match else None


def _name(launch: LaunchInfo) -> str:
    return f"rank {launch.rank} of {launch.num_ranks} (started by {launch.launcher})"


def _address(launch: LaunchInfo) -> str:
    return ":".join(map(str, launch.address or ()))


@contextmanager
def agree_at(store: dist.Store, launch: LaunchInfo) -> Iterator[None]:
    """Run a block in which any rank may raise ValueError: every rank then raises the first such rank's error.

    Collective over the store, as `agree` is over process groups. A mistake that not all ranks see begins with "rank
    N:".
    """
    mistake: ValueError | None = None
    try:
        yield
    except ValueError as caught:
        mistake = caught
    board = dist.PrefixStore("mistakes", store)
    board.set(str(launch.rank), json.dumps(str(mistake) if mistake else None))
    mistakes = [json.loads(text) for text in board.multi_get([str(rank) for rank in range(launch.num_ranks)])]
    first = next((rank for rank, text in enumerate(mistakes) if text is not None), None)
    if first is not None:
        raise ValueError(
            mistakes[first] if len(set(mistakes)) == 1 else f"rank {first}: {mistakes[first]}"
        ) from mistake
