"""Jobs that meet at one port, and strangers there: each round of each job has its own ranks, and nothing unpickles."""

import pickle
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from dcpmla.job.identity import JobIdentity, StrangerError, unpack
from dcpmla.job.launcher import find_launch_info
from dcpmla.job.rendezvous import meet
from dcpmla.job.rounds import open_round
from tests.support.launchers import Command, free_port, srun, unattended

LONG = timedelta(seconds=60)
SOON = timedelta(seconds=0.2)
JOB = JobIdentity("srun", "5", "16", 2)
THREE = replace(JOB, num_ranks=3)
OTHERS = [
    (replace(JOB, job="6", step="0"), "job '5' there, '6' here; step '16' there, '0' here"),
    (replace(JOB, launcher="torchrun"), "launcher 'srun' there, 'torchrun' here"),
    (replace(JOB, nonce="b"), "nonce '' there, 'b' here"),
    (replace(JOB, job="755", num_ranks=4), "job '5' there, '755' here; num_ranks 2 there, 4 here"),
]


def meet_as(env: Mapping[str, str]) -> dist.Store:
    return meet(find_launch_info(env, LONG), LONG)


def refuse_between(first: Sequence[Command], second: Sequence[Command]) -> str:
    """Have rank 1 of the second job come to the first one's port before rank 1 of the first; return its error."""
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(meet_as, first[0][1])
        with pytest.raises(StrangerError) as refused:
            meet_as(second[1][1])
        meet_as(first[1][1]).set("key", "value")
        assert opened.result().check(["key"])
    return str(refused.value)


def test_two_steps_of_slurm_at_one_port() -> None:
    jobs = [{"SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job, step in (("5", "16"), ("6", "0"))]
    derived = [find_launch_info(srun([], [2], "n1", **job)[1][1], LONG).address for job in jobs]
    assert derived[0] == derived[1], "these steps no longer choose the same port: choose others for this test"
    port = str(free_port())
    first, second = (srun([], [2], "localhost", MASTER_PORT=port, **job) for job in jobs)
    assert refuse_between(first, second) == (
        f"rank 1 of 2 (started by srun), at localhost:{port}: the store there is not this job's: "
        "job '5' there, '6' here; step '16' there, '0' here; set another MASTER_PORT for one of the jobs"
    )


def test_two_torchruns_at_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = unattended([], 2)
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # torch reads them itself
        monkeypatch.setenv(name, commands[0][1][name])
    first, second = ([(argv, {**env, "TORCHELASTIC_RUN_ID": name}) for argv, env in commands] for name in "ab")
    assert "job 'a' there, 'b' here; set another MASTER_PORT" in refuse_between(first, second)


@pytest.mark.parametrize(("other", "words"), OTHERS)
def test_both_sides_say_what_differs(other: JobIdentity, words: str) -> None:
    store = dist.HashStore()
    with pytest.raises(dist.DistStoreError, match="1 of 2 ranks came$"):
        open_round(store, JOB, 0, SOON)
    for rank in (1, 0):
        with pytest.raises(StrangerError) as refused:
            open_round(store, other, rank, LONG)
        assert words in str(refused.value)
    with pytest.raises(dist.DistStoreError, match="1 of 2 ranks came, and a rank of another job") as late:
        open_round(store, JOB, 0, SOON)
    assert f"({'; '.join(JOB.differences(other))})" in str(late.value)


def test_a_restart_with_fewer_ranks_is_the_same_job() -> None:
    store = dist.HashStore()
    with pytest.raises(dist.DistStoreError):
        open_round(store, replace(JOB, num_ranks=4), 0, SOON)
    with pytest.raises(dist.DistStoreError, match="another size.*num_ranks 4 there, 2 here"):
        open_round(store, JOB, 1, SOON)
    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(lambda rank: open_round(store, JOB, rank, LONG), (1, 0)))
    stores[0].set("key", "value")
    assert stores[1].check(["key"])


def test_a_rank_that_was_started_twice() -> None:
    """While the others come, the second process is refused; later, it gets no answer."""
    store, job = dist.HashStore(), THREE
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(open_round, store, job, 0, LONG)
        open_round(store, job, 1, LONG)
        with pytest.raises(StrangerError, match="another process is rank 1 of this job already"):
            open_round(store, job, 1, LONG)
        open_round(store, job, 2, LONG)
        first.result()
    with pytest.raises(dist.DistStoreError, match="or another process came as this rank"):
        open_round(store, job, 1, SOON)


def test_each_round_is_its_own() -> None:
    """In the second round a rank follows its dead predecessor's greeting; in the third, one came and died before."""
    store = dist.HashStore()
    with ThreadPoolExecutor(4) as pool:

        def enter(*ranks: int) -> list[Future[dist.Store]]:
            return [pool.submit(open_round, store, THREE, rank, LONG) for rank in ranks]

        rounds = [[entered.result() for entered in enter(0, 1, 2)]]
        early = enter(0, 1)
        time.sleep(0.5)
        assert not early[0].done(), "the first rank took a dead rank's greeting for a living one's"
        rounds.append([entered.result() for entered in [*early, *enter(2)]])
        with pytest.raises(dist.DistStoreError):
            open_round(store, THREE, 1, SOON)
        rounds.append([entered.result() for entered in enter(2, 1, 0)])
    for number, stores in enumerate(rounds):
        stores[0].set("key", "value")
        assert all(store.check(["key"]) for store in stores)
        assert not any(store.check(["key"]) for later in rounds[number + 1 :] for store in later)


def test_an_answer_that_is_no_text() -> None:
    """A rank that reads another program's answer enters a round of its own; rank 0 reports that it did not come."""
    store = dist.HashStore()
    own = dist.PrefixStore(THREE.digest, store)
    with ThreadPoolExecutor(1) as pool:
        entered = pool.submit(open_round, store, THREE, 1, LONG)
        own.wait(["greeting/1"])
        own.set(f"answer/{own.get('greeting/1').decode()}", b"\xff")
        assert entered.result() is not None
    with pytest.raises(dist.DistStoreError, match="1 of 3 ranks came"):
        open_round(store, THREE, 0, SOON)


@pytest.mark.parametrize("message", [b"", b"\xff" * 99, pickle.dumps(JOB), b"dcpmla job " + b"0" * 64 + b' {"job": 1}'])
def test_a_store_with_other_bytes(message: bytes) -> None:
    with pytest.raises(StrangerError, match="its identity is not a dcpmla job's"):
        unpack(message)


def test_an_identity_survives_its_message() -> None:
    for identity in (JOB, *(other for other, _ in OTHERS)):
        assert unpack(identity.pack().encode()) == identity
        with pytest.raises(StrangerError):
            unpack(identity.pack().replace('"step": "', '"step": "9').encode())


def test_bytes_of_a_stranger_at_the_port() -> None:
    """Ranks meet although another program talks to the store before the second rank comes."""
    port = free_port()
    ranks = srun([], [2], "localhost", MASTER_PORT=str(port))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet_as, ranks[0][1])
        for message in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, b"\xff" * 64):
            send_once_it_listens(port, message)
        meet_as(ranks[1][1]).set("key", "value")
        assert first.result().check(["key"])


def send_once_it_listens(port: int, message: bytes) -> None:
    while True:
        try:
            with socket.create_connection(("localhost", port), timeout=60) as connection:
                return connection.sendall(message)
        except ConnectionRefusedError:
            continue
