"""Rounds of a job in one store: the ranks that are alive find each other, whatever dead ones left there."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from dcpmla.job.identity import JobIdentity
from dcpmla.job.rounds import open_round

LONG = timedelta(seconds=20)
SOON = timedelta(seconds=0.2)
JOB = JobIdentity("torchrun", "a", "", 3)


def is_shared(stores: list[dist.Store]) -> bool:
    stores[0].set("key", "value")
    return all(store.check(["key"]) for store in stores)


def test_each_round_is_its_own() -> None:
    """In the second round a rank follows its dead predecessor's greeting; in the third, one came and died before."""
    store = dist.HashStore()
    with ThreadPoolExecutor(4) as pool:

        def enter(*ranks: int) -> list[Future[dist.Store]]:
            return [pool.submit(open_round, store, JOB, rank, LONG) for rank in ranks]

        rounds = [[entered.result() for entered in enter(0, 1, 2)]]
        early = enter(0, 1)
        time.sleep(0.5)
        assert not early[0].done(), "the first rank took a dead rank's greeting for a living one's"
        rounds.append([entered.result() for entered in [*early, *enter(2)]])
        with pytest.raises(dist.DistStoreError):
            open_round(store, JOB, 1, SOON)
        rounds.append([entered.result() for entered in enter(2, 1, 0)])
    for number, stores in enumerate(rounds):
        assert is_shared(stores)
        assert not any(store.check(["key"]) for later in rounds[number + 1 :] for store in later)


def test_an_answer_that_is_no_text() -> None:
    """A rank that reads another program's answer enters a round of its own; rank 0 reports that it did not come."""
    store = dist.HashStore()
    own = dist.PrefixStore(JOB.digest, store)
    with ThreadPoolExecutor(1) as pool:
        entered = pool.submit(open_round, store, JOB, 1, LONG)
        own.wait(["greeting/1"])
        own.set(f"answer/{own.get('greeting/1').decode()}", b"\xff")
        assert entered.result() is not None
    with pytest.raises(dist.DistStoreError, match="1 of 3 ranks came"):
        open_round(store, JOB, 0, SOON)
