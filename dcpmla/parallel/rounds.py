"""One store for several rounds of a job: torchrun's agent keeps it over restarts of the ranks, with everything written there before."""

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_POLL = 0.05  # seconds


def open_round(store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> dist.Store:
    """The part of a store that belongs to the ranks that are alive now. Collective.

    A greeting in the store may be from a rank that is dead, and restarts are not counted alike on every host. So rank 0 names the round and
    answers every greeting; a rank knows the answer to its own by a number that nobody had before.

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
