"""Engines with a disk below a small host memory: every request gets the tokens that it gets alone."""

import logging
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from dcpmla.parallel.collectives import is_failed_collective
from dcpmla.parallel.mesh import init_mesh
from dcpmla.runtime import disk_offload, offload
from dcpmla.runtime.disk_offload import DiskOffload
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from tests.support.costs import DrawnLoadCosts
from tests.support.engine_loads import Ask, Load, check_empty, draw_load, loads, serve, settle
from tests.support.hash_model import BLOCK, MESH, alone, alone_ignoring_eos, answer, make_engine
from tests.support.late_disk import late_disk, threaded_disk
from tests.support.late_memory import LateMemory
from tests.support.ranks import run_ranks, start_process

PROMPT = [7, 3, 5] * 8
OTHERS = [[1, 2, 3, 4] * 6, [4, 3, 2, 1] * 6, [6, 6, 1, 0] * 6]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tiers, and how late and badly their transfers end."""

    num_host_blocks: int
    num_disk_blocks: int
    num_stored_together: int
    num_part_blocks: int
    num_polls: int
    share_of_failures: float
    seed: int

    @classmethod
    def draw(cls, rng: Random) -> "Sizes":
        together, host, disk = (rng.choice(each) for each in ([1, 3, 32], [1, 4, 12, 16, 24], [1, 6, 40, 200]))
        polls, share = rng.choice([0, 1, 4, 30]), rng.choice([0, 0, 0.1, 1])
        return cls(host, disk, together, rng.choice([1, 3, 32]), polls, share, rng.randint(0, 1000))

    def serve(
        self, load: Load, directory: Path, costs: int = 0, mesh: Any = MESH
    ) -> Iterator[tuple[Engine, list[Request]]]:
        """Yield two engines, of which the second finds the blocks of the first, with the requests that each served."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offload, "_STORED_TOGETHER", self.num_stored_together)
            patch.setattr(disk_offload, "_PART_BLOCKS", self.num_part_blocks)
            patch.setattr(LateMemory, "num_polls", self.num_polls + mesh.tp_rank)
            patch.setattr("dcpmla.runtime.engine._POLL_SECONDS", 0)
            for _ in range(2):
                late = self.num_disk_blocks, self.seed, self.num_polls, self.share_of_failures
                disk = late_disk(directory, *late, mesh.tp_rank, mesh.tp_group)
                tiers = {"num_host_blocks": self.num_host_blocks, "open_disk": disk}
                engine = make_engine(*load.limits, mesh=mesh, memory=LateMemory, **tiers)
                engine.scheduler.reuse._costs = DrawnLoadCosts(costs)
                engine.scheduler.reuse._disk_costs = DrawnLoadCosts(costs and costs + 3)
                requests = serve(engine, load)
                check_empty(engine)
                yield engine, requests
                engine.close()


# The shorter prompt computes a block that the longer one waits for.
BOTH_WAYS = Load([Ask([0] * 16, 1, arrival=1), Ask([0] * 17, 1)], 5, 3, 2)


@given(
    load=loads(most=10, longest=30, latest=40, aborts=True),
    sizes=st.randoms(use_true_random=False).map(Sizes.draw),
    costs=st.integers(0, 3),
)
@example(load=BOTH_WAYS, sizes=Sizes(12, 6, 1, 1, 0, 0, 0), costs=0)
def test_every_request_gets_what_it_gets_alone(load: Load, sizes: Sizes, costs: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        assert len(list(sizes.serve(load, Path(directory), costs))) == 2


def disk_of(engine: Engine) -> DiskOffload:
    assert engine.offload is not None
    assert engine.offload.disk is not None
    return engine.offload.disk


def engine_with_prompt_on_disk(open_disk: Any, num_blocks: int = 8, others: Sequence[list[int]] = OTHERS) -> Engine:
    """Return an engine that has served the prompt, whose blocks the others have pushed out of host memory since."""
    engine = make_engine(num_blocks, num_host_blocks=9, open_disk=open_disk)
    for prompt in (PROMPT, *others):
        answer(engine, prompt)
        settle(engine)
    return engine


FULL = (len(PROMPT) - 1) // BLOCK * BLOCK  # tokens of its full blocks


@pytest.mark.parametrize("open_disk", [late_disk, threaded_disk])
def test_a_prompt_that_has_left_host_memory_comes_from_the_disk(open_disk: Any, tmp_path: Path) -> None:
    engine = engine_with_prompt_on_disk(open_disk(tmp_path, 40))
    assert answer(engine, PROMPT)[0].num_cached_tokens == FULL
    assert disk_of(engine).loaded.blocks == FULL // BLOCK
    assert disk_of(engine).loaded.bytes == FULL // BLOCK * 4096
    assert engine.offload is not None
    totals = engine.offload.totals()
    assert set(totals) == {(tier, direction) for tier in ("host", "disk") for direction in ("load", "store")}
    assert totals["disk", "store"].blocks == 4 * 6
    check_empty(engine)
    engine.close()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_conversation_continues_after_a_restart(is_killed: bool, tmp_path: Path) -> None:
    """Also its last blocks, which nothing has pushed out of the cache. A killed server loses nothing that was computed
    before it was idle.
    """
    engine = make_engine(40, num_host_blocks=40, open_disk=threaded_disk(tmp_path, 40))
    conversation, path = PROMPT + answer(engine, PROMPT, num_new=9)[0].token_ids, tmp_path
    if is_killed:
        settle(engine)
        path = shutil.copytree(tmp_path, tmp_path / "copy")  # a kill leaves the same files
    else:
        engine.close()
    engine = make_engine(40, num_host_blocks=40, open_disk=threaded_disk(path, 40))
    assert answer(engine, [*conversation, 1, 2, 3])[0].num_cached_tokens == (len(conversation) - 1) // BLOCK * BLOCK
    engine.close()


@pytest.mark.parametrize("damage", ["flip", "truncate", "no index"])
def test_damaged_files(damage: str, tmp_path: Path) -> None:
    engine = make_engine(40, num_host_blocks=40, open_disk=threaded_disk(tmp_path, 40))
    answer(engine, PROMPT)
    settle(engine)
    slots = engine.scheduler.tier.disk.blocks
    engine.close()
    (blocks,) = tmp_path.glob("*/rank0.0.blocks")
    content = bytearray(blocks.read_bytes())
    (third,) = slots.slots([*slots._slots][2:3])
    if damage == "flip":
        content[third * 4096 + 5] ^= 1
    elif damage == "truncate":
        del content[third * 4096 :]
    else:
        blocks.with_suffix(".index").unlink()
    blocks.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_offload, "_PART_BLOCKS", 1)
        engine = make_engine(40, num_host_blocks=40, open_disk=threaded_disk(tmp_path, 40))
        known = engine.scheduler.tier.disk.blocks
        assert len(known) == (0 if damage == "no index" else FULL // BLOCK + 1)
        assert answer(engine, PROMPT)[0].num_cached_tokens == (0 if damage == "no index" else 2 * BLOCK)
    check_empty(engine)
    assert len(engine.scheduler.tier.disk.blocks) == FULL // BLOCK + 1
    engine.close()
    engine = make_engine(40, num_host_blocks=40, open_disk=threaded_disk(tmp_path, 40))
    assert answer(engine, PROMPT)[0].num_cached_tokens == FULL  # damaged blocks have been written again
    engine.reset()
    engine.close()


def serve_on_rank(directory: Path, num_ranks: int, seeds: list[int]) -> list[tuple[Any, ...]]:
    """On one rank: serve loads, and return cached tokens, contents of the tiers and numbers of blocks read."""
    mesh, results = init_mesh(num_ranks, 1), []
    for seed in seeds:
        rng = Random(seed)
        asks = draw_load(rng, least=25, most=25, longest=40, latest=80, num_new=6, aborts=True).asks
        load = Load(asks, 14 + rng.randrange(4), rng.choice([7, 64]), rng.choice([1, 4]))
        together, part, polls, share = (rng.choice(each) for each in ([1, 3], [1, 3], [0, 3, 10], [0, 0.05, 0.2]))
        sizes = Sizes(rng.choice([12, 20]), rng.choice([10, 60]), together, part, polls, share, seed)
        for engine, requests in sizes.serve(load, directory / str(seed), mesh=mesh):
            tier = engine.scheduler.tier
            contents = [dict(table._slots) for table in (tier.blocks, tier.disk.blocks)]
            results.append((contents, [each.num_cached_tokens for each in requests], disk_of(engine).loaded.blocks))
    return results


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_whose_disks_fail_differently(num_ranks: int, tmp_path: Path) -> None:
    """All ranks know the same content after each load, and every request gets its tokens."""
    results = run_ranks(num_ranks, serve_on_rank, tmp_path, num_ranks, [5, 9, 11])
    assert all(result == results[0] for result in results)
    assert sum(num_read for *_, num_read in results[0]) > 50


def test_an_abort_while_blocks_are_read(tmp_path: Path) -> None:
    """The blocks arrive, and serve the next request; a second one that waits for them goes on."""
    engine = engine_with_prompt_on_disk(late_disk(tmp_path, 40, num_polls=0))
    disk = disk_of(engine)
    disk._files.blocks._num_polls = 20
    first, second = (engine.add(PROMPT, SamplingParams(max_new_tokens=3)) for _ in range(2))
    engine.step()
    assert disk._num_reads == 1
    engine.abort(first)
    list(engine.run())
    assert second.token_ids == alone(PROMPT, 3)
    assert second.num_cached_tokens == FULL
    assert disk.loaded.blocks == FULL // BLOCK
    check_empty(engine)
    engine.close()


def test_others_run_while_blocks_are_read(tmp_path: Path) -> None:
    others = *OTHERS, OTHERS[0][::-1], OTHERS[1][1:]
    engine = engine_with_prompt_on_disk(late_disk(tmp_path, 60, num_polls=0), 16, others)
    disk_of(engine)._files.blocks._num_polls = 50
    read = engine.add(PROMPT, SamplingParams(max_new_tokens=3))
    other = engine.add([9, 9, 9], SamplingParams(max_new_tokens=12, ignore_eos=True))
    while not read.token_ids:
        num_before = len(other.token_ids)
        engine.step()
        assert len(other.token_ids) > num_before or num_before in (0, 12)
    assert len(other.token_ids) == 12
    list(engine.run())
    assert read.num_cached_tokens == FULL
    engine.close()


def test_host_memory_keeps_the_beginning_while_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_STORED_TOGETHER", 1)
    engine = make_engine(24, num_host_blocks=9, open_disk=late_disk(tmp_path, 60, num_polls=0))
    keys = answer(engine, PROMPT)[0].block_keys(0, FULL // BLOCK, BLOCK)
    settle(engine)
    engine.allocator.reset()
    for key in keys[2:]:
        engine.scheduler.tier.blocks.remove(key)
    disk_of(engine)._files.blocks._num_polls = 70
    read = engine.add(PROMPT, SamplingParams(max_new_tokens=3))
    other = engine.add([9, 9, 9], SamplingParams(max_new_tokens=40, ignore_eos=True))
    list(engine.run())
    assert read.num_cached_tokens == FULL
    assert read.token_ids == alone(PROMPT, 3)
    assert other.token_ids == alone_ignoring_eos([9, 9, 9], 40)
    assert disk_of(engine).loaded.blocks == len(keys[2:])
    check_empty(engine)


def test_no_request_waits_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = engine_with_prompt_on_disk(late_disk(tmp_path, 40, num_polls=0))
    disk = disk_of(engine)
    disk._files.blocks._num_polls = 10**12
    monkeypatch.setattr(disk_offload, "_MOST_SECONDS", 0.2)
    for prompt in (PROMPT, OTHERS[0], OTHERS[1]):
        assert answer(engine, prompt)[0].num_cached_tokens < FULL
    assert disk._num_reads == 1
    assert caplog.messages == [
        "the disk is not read for a request, whose tokens are computed: a reading has taken longer than 0.2 s"
    ]
    for transfer in disk._files.blocks.busy.values():  # the disk is back
        transfer._num_polls = 0
    check_empty(engine)


def test_a_disk_that_host_memory_has_no_room_for_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    engine = engine_with_prompt_on_disk(late_disk(tmp_path, 40, num_polls=0))
    host = engine.scheduler.tier.blocks
    held = [*host._slots]
    assert len(held) == host.num_slots
    host.hold(held)
    for level in ("INFO", "DEBUG"):
        assert answer(engine, PROMPT)[0].num_cached_tokens == 0
        engine.allocator.reset()
        (record,) = caplog.records
        assert record.levelname == level
        assert record.getMessage().endswith("host memory has no room for it (--kv-offloading-size)")
        caplog.clear()
    host.release(held)
    check_empty(engine)


def test_nothing_is_kept_after_a_reset(tmp_path: Path) -> None:
    engine = make_engine(8, num_host_blocks=9, open_disk=late_disk(tmp_path, 40, num_polls=30))
    for prompt in (PROMPT, *OTHERS):
        answer(engine, prompt)
    engine.reset()
    check_empty(engine)
    assert len(engine.scheduler.tier.disk.blocks) == 0
    assert answer(engine, PROMPT)[0].num_cached_tokens == 0
    check_empty(engine)
    engine.close()


def lose_rank_1(directory: Path, rank: int, sender: Connection) -> None:
    """On one rank: rank 1 ends while blocks are read; send the error of rank 0."""
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), 2), rank=rank, world_size=2)
    mesh = init_mesh(2, 1)
    open_disk = late_disk(directory, 40, num_polls=0, rank=rank, group=mesh.tp_group)
    engine = make_engine(8, mesh=mesh, num_host_blocks=9, open_disk=open_disk)
    for prompt in (PROMPT, *OTHERS):
        answer(engine, prompt)
        settle(engine)
    disk_of(engine)._files.blocks._num_polls = 1_000_000
    engine.add(PROMPT, SamplingParams(max_new_tokens=3))
    engine.step()
    assert disk_of(engine)._num_reads == 1
    if rank == 1:
        os._exit(1)
    with pytest.raises(RuntimeError) as caught:
        list(engine.run())
    assert is_failed_collective(caught.value)
    sender.send(str(caught.value.__notes__))


def test_a_rank_that_dies_while_blocks_are_read(tmp_path: Path) -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    processes = [start_process(lose_rank_1, (tmp_path, rank, sender)) for rank in range(2)]
    try:
        assert receiver.poll(60)
        assert "agreeing on the time failed on rank 0" in receiver.recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
