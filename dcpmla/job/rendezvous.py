"""Where the ranks meet before there are process groups: one store, in time or not at all, and what is told there first:
mistakes.
"""

import json
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:  # which itself opens rounds
    from dcpmla.job.launcher import LaunchInfo

_POLL = 0.05  # seconds
_GRACE = 5.0  # seconds beyond the timeout that the store's client has to see it itself
_RETRY = 0.5  # seconds between two look-ups of a host name


def meet(place: "LaunchInfo", timeout: timedelta) -> dist.Store:
    """Connect to the store where the job's ranks meet.

    Raises:
        ConnectionError: the ranks did not meet in time.
    """
    outcome: Future[dist.Store] = Future()
    # A thread, because the store's client waits for ever for a listener that is no store and never speaks.
    threading.Thread(target=_open, args=(place, timeout, outcome), daemon=True).start()
    try:
        return outcome.result(timeout.total_seconds() + _GRACE)
    except TimeoutError:
        error: Exception = ConnectionError(
            f"what listens at {_where(place)} is not rank 0, or is stopped: set another MASTER_PORT"
        )
    except (dist.DistError, OSError) as caught:
        error = caught
    reason = (str(error).splitlines() or [repr(error)])[0]
    raise ConnectionError(
        f"rank {place.rank} of {place.num_ranks} (started by {place.launcher}) did not meet the others within "
        f"{timeout.total_seconds():.0f} s: {reason}; see that all ranks were started and reach rank 0's host (MASTER_ADDR, MASTER_PORT)"
    ) from error


def _open(place: "LaunchInfo", timeout: timedelta, outcome: Future[dist.Store]) -> None:
    try:
        _resolve(place, time.monotonic() + timeout.total_seconds())
        outcome.set_result(place.open_store(timeout))
    except Exception as error:
        outcome.set_exception(error)


def _resolve(place: "LaunchInfo", until: float) -> None:
    """Look rank 0's host up until it is known: torch would print its stack for each try."""
    while place.address:
        try:
            socket.getaddrinfo(*place.address)
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() > until:
                raise ConnectionError(
                    f"the host name {place.address[0]!r} does not resolve here ({error}): set MASTER_ADDR"
                ) from error
            time.sleep(_RETRY)
        else:
            return


def _where(place: "LaunchInfo") -> str:
    return ":".join(map(str, place.address or ()))


@contextmanager
def agree_at(store: dist.Store, place: "LaunchInfo") -> Iterator[None]:
    """Run a block that any rank's ValueError may end: then every rank raises the ValueError of the first rank that
    has one.

    Collective, over the store; `agree` does the same once process groups are there. A mistake that not all ranks
    see begins with "rank N:".
    """
    mistake: ValueError | None = None
    try:
        yield
    except ValueError as caught:
        mistake = caught
    board = dist.PrefixStore("mistakes", store)
    board.set(str(place.rank), json.dumps(str(mistake) if mistake else None))
    mistakes = [json.loads(text) for text in board.multi_get([str(rank) for rank in range(place.num_ranks)])]
    first = next((rank for rank, text in enumerate(mistakes) if text is not None), None)
    if first is not None:
        raise ValueError(
            mistakes[first] if len(set(mistakes)) == 1 else f"rank {first}: {mistakes[first]}"
        ) from mistake


def open_round(store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> dist.Store:
    """The part of a store that belongs to the ranks that are alive now. Collective.

    A greeting in the store may be from a rank that is dead, and restarts are not counted alike on every host. So
    rank 0 names the round and answers every greeting; a rank knows the answer to its own by a number that nobody had
    before.

    Raises:
        torch.distributed.DistStoreError: not all came in time.
    """
    if rank:
        greeting = uuid.uuid4().hex
        store.set(f"greeting/{rank}", greeting)
        store.wait([f"answer/{greeting}"], timeout)
        name = store.get(f"answer/{greeting}").decode()
        store.add(f"{name}/met", 1)
    else:
        name = uuid.uuid4().hex
        _answer_greetings(store, name, num_ranks, time.monotonic() + timeout.total_seconds())
    return dist.PrefixStore(name, store)


def _answer_greetings(store: dist.Store, name: str, num_ranks: int, until: float) -> None:
    greetings = [f"greeting/{rank}" for rank in range(1, num_ranks)]
    while (num_met := store.add(f"{name}/met", 0)) < num_ranks - 1:
        if time.monotonic() > until:
            raise dist.DistStoreError(f"{num_met + 1} of {num_ranks} ranks came")
        for greeting in store.multi_get([key for key in greetings if store.check([key])]):
            store.set(f"answer/{greeting.decode()}", name)
        time.sleep(_POLL)
