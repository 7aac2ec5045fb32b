"""Rounds: the ranks of one job that are alive find each other in a store that other jobs may reach, too.

Rank 0 writes the job's identity to the store, and every other rank compares it with its own before it takes part. All
further keys have the identity's digest in front. Nothing that is read here is a pickle.
"""

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from dcpmla.job.identity import JobIdentity, StrangerError, unpack

_POLL = 0.05  # seconds
_OWNER, _STRANGER = "dcpmla/owner", "dcpmla/stranger"  # keys that all jobs at a store share
_ADVICE = "set another MASTER_PORT for one of the jobs"


def open_round(store: dist.Store, identity: JobIdentity, rank: int, timeout: timedelta) -> dist.Store:
    """Return the part of a store that belongs to the ranks of this job that are alive now. Collective.

    A greeting in the store may come from a rank that is dead, and restarts are not counted alike on every host. So rank
    0 names the round and answers every greeting; a rank recognizes the answer to its own by a unique number. Each rank
    enters the round once: a second process with its number is refused.

    Raises:
        StrangerError: The store is another job's, or this rank entered already.
        torch.distributed.DistStoreError: Not all ranks came in time.
    """
    own = dist.PrefixStore(identity.digest, store)
    until = time.monotonic() + timeout.total_seconds()
    if rank:
        return _greet(store, own, identity, rank, until)
    owner = store.compare_set(_OWNER, "", identity.pack())
    _check_owner(store, identity, owner)
    store.set(_OWNER, identity.pack())
    name = uuid.uuid4().hex
    _answer_greetings(store, own, identity, name, until)
    return dist.PrefixStore(name, own)


def _greet(store: dist.Store, own: dist.Store, identity: JobIdentity, rank: int, until: float) -> dist.Store:
    greeting, owner = uuid.uuid4().hex, None
    own.set(f"greeting/{rank}", greeting)
    while not own.check([f"answer/{greeting}"]):
        if store.check([_OWNER]):
            owner = _check_owner(store, identity, store.get(_OWNER))
        if time.monotonic() > until:
            raise dist.DistStoreError(_silence(identity, owner))
        time.sleep(_POLL)
    entered = dist.PrefixStore(own.get(f"answer/{greeting}").decode(errors="replace"), own)
    if entered.compare_set(f"entered/{rank}", "", greeting) != greeting.encode():
        raise StrangerError(f"another process is rank {rank} of this job already; start each rank once, or {_ADVICE}")
    return entered


def _check_owner(store: dist.Store, identity: JobIdentity, message: bytes) -> JobIdentity:
    """Return the store's owner; before refusing it, leave this rank's identity for the owner's report."""
    try:
        owner = unpack(message)
        if identity.is_same_start(owner):
            return owner
        reason = "; ".join(identity.differences(owner))
    except StrangerError as error:
        reason = str(error)
    store.set(_STRANGER, identity.pack())
    raise StrangerError(f"the store there is not this job's: {reason}; {_ADVICE}")


def _silence(identity: JobIdentity, owner: JobIdentity | None) -> str:
    if owner is None:
        return "rank 0 did not come"
    if owner != identity:
        return f"rank 0 started with another size ({'; '.join(identity.differences(owner))})"
    return "rank 0 does not answer: it stopped, or another process came as this rank"


def _answer_greetings(store: dist.Store, own: dist.Store, identity: JobIdentity, name: str, until: float) -> None:
    ranks = range(1, identity.num_ranks)
    while missing := [rank for rank in ranks if not own.check([f"{name}/entered/{rank}"])]:
        if time.monotonic() > until:
            came = f"{identity.num_ranks - len(missing)} of {identity.num_ranks} ranks came"
            raise dist.DistStoreError(came + _describe_stranger(store, identity))
        for rank in ranks:
            if own.check([f"greeting/{rank}"]):
                own.set(f"answer/{own.get(f'greeting/{rank}').decode(errors='replace')}", name)
        time.sleep(_POLL)


def _describe_stranger(store: dist.Store, identity: JobIdentity) -> str:
    """Describe another job's rank that came to the store, if any did."""
    if not store.check([_STRANGER]):
        return ""
    try:
        stranger = unpack(store.get(_STRANGER))
    except StrangerError as error:
        return f", and a stranger: {error}"
    differences = "; ".join(identity.differences(stranger))
    return f", and a rank of another job ({differences}): {_ADVICE}" if differences else ""
