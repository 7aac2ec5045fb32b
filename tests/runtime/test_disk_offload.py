"""Engines with a disk below a small host memory: every request gets the tokens that it gets alone."""

import itertools
import multiprocessing
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random, random
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
from tests.runtime.test_offload import DrawnLoadCosts
from tests.support.hash_model import BLOCK, EOS, alone, alone_ignoring_eos, make_engine
from tests.support.late_disk import late_disk, threaded_disk
from tests.support.late_memory import LateMemory
from tests.support.ranks import run_ranks, start_process

PROMPT = [7, 3, 5] * 8
OTHERS = [[1, 2, 3, 4] * 6, [4, 3, 2, 1] * 6, [6, 6, 1, 0] * 6]


@dataclass(frozen=True)
class Load:
    """Prompts are a shared beginning and an own end; each arrives after a number of steps, and may be aborted."""

    prompts: list[tuple[list[int], int, int, int]]  # tokens, max_new_tokens, step of arrival, steps until an abort
    num_blocks: int
    num_host_blocks: int
    num_disk_blocks: int
    num_stored_together: int
    num_part_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    costs: int
    num_polls: int
    share_of_failures: float
    seed: int


@st.composite
def loads(draw: st.DrawFn) -> Load:
    tokens = st.lists(st.integers(0, EOS - 1), min_size=8, max_size=40)
    beginnings = draw(st.lists(tokens, min_size=1, max_size=4))
    prompts = []
    for _ in range(draw(st.integers(1, 20))):
        prompt = [*draw(st.sampled_from(beginnings)), *draw(st.lists(st.integers(0, EOS - 1), min_size=1, max_size=6))]
        abort = draw(st.sampled_from([1000, 1000, 1000, 0, 1, 3]))
        prompts.append((prompt, draw(st.integers(1, 10)), draw(st.integers(0, 60)), abort))
    largest = max(-(-(len(prompt) + num_new - 1) // BLOCK) for prompt, num_new, *_ in prompts)
    return Load(
        prompts,
        num_blocks=largest + draw(st.integers(0, 6)),
        num_host_blocks=draw(st.sampled_from([1, 4, 12, 16, 24])),
        num_disk_blocks=draw(st.sampled_from([1, 6, 40, 200])),
        num_stored_together=draw(st.sampled_from([1, 3, 32])),
        num_part_blocks=draw(st.sampled_from([1, 3, 32])),
        max_num_batched_tokens=draw(st.sampled_from([3, 7, 64])),
        max_num_seqs=draw(st.sampled_from([1, 2, 16])),
        costs=draw(st.integers(0, 3)),
        num_polls=draw(st.sampled_from([0, 1, 4, 30])),
        share_of_failures=draw(st.sampled_from([0, 0, 0.1, 1])),
        seed=draw(st.integers(0, 1000)),
    )


def settle(engine: Engine) -> None:
    """Step until all transfers have ended."""
    for _ in range(10_000):
        engine.step()
        if engine._agreement.progress.is_empty and not engine.scheduler.tier.num_pending:
            return
    raise AssertionError("transfers do not end")


def check_empty(engine: Engine) -> None:
    """Assert that no block of the cache is held, and each slot of host memory and of the disk has at most one key."""
    settle(engine)
    assert engine.allocator.num_free == engine.allocator.num_blocks
    tier, reads = engine.scheduler.tier, engine.scheduler.reads
    assert reads is not None
    for table in (tier.blocks, tier.states, tier.disk.blocks, tier.disk.states):
        assert sorted([*table._slots.values(), *table._free]) == list(range(table.num_slots))
        assert not table._holders
    assert not any([reads.queue, reads._readings, reads._awaited, reads._coming])


def serve(engine: Engine, load: Load) -> list[Request]:
    requests: dict[int, Request] = {}
    num_steps = 0
    while len(requests) < len(load.prompts) or engine.has_requests:
        for index, (prompt, num_new, arrival, abort) in enumerate(load.prompts):
            if arrival == num_steps:
                requests[index] = engine.add(prompt, SamplingParams(max_new_tokens=num_new))
            if arrival + abort == num_steps:
                engine.abort(requests[index])
        engine.step()
        num_steps += 1
        assert num_steps < 20_000
    for index, (prompt, num_new, *_) in enumerate(load.prompts):
        expected = alone(prompt, num_new)
        assert requests[index].token_ids == expected[: len(requests[index].token_ids)]
        assert requests[index].finish_reason == "abort" or requests[index].token_ids == expected
    return [requests[index] for index in range(len(load.prompts))]


def engine_of(load: Load, directory: Path) -> Engine:
    limits = load.num_blocks, load.max_num_batched_tokens, load.max_num_seqs
    disk = late_disk(directory, load.num_disk_blocks, load.seed, load.num_polls, load.share_of_failures)
    engine = make_engine(*limits, memory=LateMemory, num_host_blocks=load.num_host_blocks, open_disk=disk)
    engine.scheduler.reuse._costs = DrawnLoadCosts(load.costs)
    engine.scheduler.reuse._disk_costs = DrawnLoadCosts(load.costs and load.costs + 3)
    return engine


# The shorter prompt computes a block that the longer one waits for.
BOTH_WAYS = Load([([0] * 16, 1, 1, 1000), ([0] * 17, 1, 0, 1000)], 5, 12, 6, 1, 1, 3, 2, 0, 0, 0, 0)


@given(load=loads())
@example(load=BOTH_WAYS)
def test_every_request_gets_what_it_gets_alone(load: Load) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setattr(offload, "_STORED_TOGETHER", load.num_stored_together)
        patch.setattr(disk_offload, "_PART_BLOCKS", load.num_part_blocks)
        patch.setattr(LateMemory, "num_polls", load.num_polls)
        patch.setattr("dcpmla.runtime.engine._POLL_SECONDS", 0)
        for _ in range(2):  # the second engine finds the first one's blocks
            engine = engine_of(load, Path(directory))
            serve(engine, load)
            check_empty(engine)
            engine.close()


def answer(engine: Engine, prompt: list[int], num_new: int = 3) -> Request:
    """Serve a request, and compare its tokens with a lone request's."""
    request = engine.add(prompt, SamplingParams(max_new_tokens=num_new))
    list(engine.run())
    assert request.token_ids == alone(prompt, num_new)
    return request


def disk_of(engine: Engine) -> DiskOffload:
    assert engine.offload is not None
    assert engine.offload.disk is not None
    return engine.offload.disk


FULL = (len(PROMPT) - 1) // BLOCK * BLOCK  # tokens of its full blocks


@pytest.mark.parametrize("open_disk", [late_disk, threaded_disk])
def test_a_prompt_that_has_left_host_memory_comes_from_the_disk(open_disk: Any, tmp_path: Path) -> None:
    engine = make_engine(8, num_host_blocks=9, open_disk=open_disk(tmp_path, 40))
    for prompt in (PROMPT, *OTHERS):
        answer(engine, prompt)
        settle(engine)
    assert answer(engine, PROMPT).num_cached_tokens == FULL
    assert disk_of(engine).loaded.blocks == FULL // BLOCK
    assert disk_of(engine).loaded.bytes == FULL // BLOCK * 4096
    assert engine.offload is not None
    totals = engine.offload.totals()
    assert set(totals) == {(tier, direction) for tier in ("host", "disk") for direction in ("load", "store")}
    assert totals["disk", "store"].blocks == 4 * 6
    check_empty(engine)
    engine.close()


def test_a_conversation_continues_after_a_restart(tmp_path: Path) -> None:
    """Also its last blocks, which nothing has pushed out of the cache."""
    engine = make_engine(40, num_host_blocks=40, open_disk=threaded_disk(tmp_path, 40))
    conversation = PROMPT + answer(engine, PROMPT, 9).token_ids
    engine.close()
    engine = make_engine(40, num_host_blocks=40, open_disk=threaded_disk(tmp_path, 40))
    assert answer(engine, [*conversation, 1, 2, 3]).num_cached_tokens == (len(conversation) - 1) // BLOCK * BLOCK
    engine.close()


def test_an_idle_engine_writes_all_blocks(tmp_path: Path) -> None:
    """A killed server loses nothing that was computed before it was idle."""
    engine = make_engine(40, num_host_blocks=40, open_disk=threaded_disk(tmp_path, 40))
    answer(engine, PROMPT)
    settle(engine)
    shutil.copytree(tmp_path, tmp_path / "copy")  # a kill leaves the same files
    engine = make_engine(40, num_host_blocks=40, open_disk=threaded_disk(tmp_path / "copy", 40))
    assert answer(engine, PROMPT).num_cached_tokens == FULL
    engine.close()


@pytest.mark.parametrize("damage", ["flip", "truncate", "swap", "no index"])
def test_damaged_files(damage: str, tmp_path: Path) -> None:
    engine = make_engine(40, num_host_blocks=40, open_disk=threaded_disk(tmp_path, 40))
    answer(engine, PROMPT)
    settle(engine)
    slots = engine.scheduler.tier.disk.blocks
    engine.close()
    (blocks,) = tmp_path.glob("*/rank0.0.blocks")
    content = bytearray(blocks.read_bytes())
    third, fourth = slots.slots([*slots._slots][2:4])
    if damage == "flip":
        content[third * 4096 + 5] ^= 1
    elif damage == "truncate":
        del content[third * 4096 :]
    elif damage == "swap":
        both = [slice(slot * 4096, (slot + 1) * 4096) for slot in (third, fourth)]
        content[both[0]], content[both[1]] = content[both[1]], content[both[0]]
    else:
        blocks.with_suffix(".index").unlink()
    blocks.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_offload, "_PART_BLOCKS", 1)
        engine = make_engine(40, num_host_blocks=40, open_disk=threaded_disk(tmp_path, 40))
        known = engine.scheduler.tier.disk.blocks
        assert len(known) == (0 if damage == "no index" else FULL // BLOCK + 1)
        assert answer(engine, PROMPT).num_cached_tokens == (0 if damage == "no index" else 2 * BLOCK)
    check_empty(engine)
    assert len(engine.scheduler.tier.disk.blocks) == FULL // BLOCK + 1
    engine.close()
    engine = make_engine(40, num_host_blocks=40, open_disk=threaded_disk(tmp_path, 40))
    assert answer(engine, PROMPT).num_cached_tokens == FULL  # damaged blocks have been written again
    engine.reset()
    engine.close()


def drawn_load(seed: int) -> Load:
    rng = Random(seed)
    beginnings = [[rng.randrange(EOS) for _ in range(rng.randint(8, 40))] for _ in range(3)]
    prompts = []
    for _ in range(25):
        prompt = [*rng.choice(beginnings), *(rng.randrange(EOS) for _ in range(rng.randint(1, 6)))]
        prompts.append((prompt, rng.randint(1, 6), rng.randrange(80), rng.choice([1000, 1000, 1000, 2])))
    return Load(
        prompts,
        num_blocks=14 + rng.randrange(4),
        num_host_blocks=rng.choice([12, 20]),
        num_disk_blocks=rng.choice([10, 60]),
        num_stored_together=rng.choice([1, 3]),
        num_part_blocks=rng.choice([1, 3]),
        max_num_batched_tokens=rng.choice([7, 64]),
        max_num_seqs=rng.choice([1, 4]),
        costs=0,
        num_polls=rng.choice([0, 3, 10]),
        share_of_failures=rng.choice([0, 0.05, 0.2]),
        seed=seed,
    )


def serve_on_rank(directory: Path, num_ranks: int, seeds: list[int]) -> list[tuple[Any, ...]]:
    """On one rank: serve loads, and return cached tokens, contents of the tiers and numbers of blocks read."""
    mesh, rank, results = init_mesh(num_ranks, 1), dist.get_rank(), []
    for seed in seeds:
        load = drawn_load(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offload, "_STORED_TOGETHER", load.num_stored_together)
            patch.setattr(disk_offload, "_PART_BLOCKS", load.num_part_blocks)
            patch.setattr(LateMemory, "num_polls", load.num_polls + rank)
            for _ in range(2):  # the second engine finds the first one's blocks
                disk = (load.num_disk_blocks, seed, load.num_polls, load.share_of_failures, rank, mesh.tp_group)
                engine = make_engine(
                    load.num_blocks,
                    load.max_num_batched_tokens,
                    load.max_num_seqs,
                    mesh=mesh,
                    memory=LateMemory,
                    num_host_blocks=load.num_host_blocks,
                    open_disk=late_disk(directory / str(seed), *disk),
                )
                requests = serve(engine, load)
                check_empty(engine)
                tier = engine.scheduler.tier
                contents = [dict(table._slots) for table in (tier.blocks, tier.disk.blocks)]
                results.append((contents, [each.num_cached_tokens for each in requests], disk_of(engine).loaded.blocks))
                engine.close()
    return results


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_whose_disks_fail_differently(num_ranks: int, tmp_path: Path) -> None:
    """All ranks know the same content after each load, and every request gets its tokens."""
    results = run_ranks(num_ranks, serve_on_rank, tmp_path, num_ranks, list(range(4)))
    assert all(result == results[0] for result in results)
    assert sum(num_read for *_, num_read in results[0]) > 50


def test_two_jobs_on_one_directory(tmp_path: Path) -> None:
    """The second one has a file of its own; the next job finds its blocks."""
    first, second = (make_engine(40, num_host_blocks=40, open_disk=threaded_disk(tmp_path, 40)) for _ in range(2))
    for engine, prompt in ((first, OTHERS[0]), (second, PROMPT)):
        assert answer(engine, prompt).num_cached_tokens == 0
    for engine in (first, second):
        engine.close()
    third = make_engine(40, num_host_blocks=40, open_disk=threaded_disk(tmp_path, 40))
    assert answer(third, PROMPT).num_cached_tokens == FULL
    assert answer(third, OTHERS[0]).num_cached_tokens == 0
    third.close()


def serve_for_ever(directory: Path, sender: Connection) -> None:
    engine = make_engine(20, num_host_blocks=40, open_disk=threaded_disk(directory, 60))
    for number in itertools.count():
        answer(engine, [number % 5, *PROMPT[number % 7 :]])
        settle(engine)
        sender.send(number)


def test_blocks_of_a_killed_process(tmp_path: Path) -> None:
    """A process that is killed while it writes leaves right blocks, or none."""
    for _ in range(4):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = start_process(serve_for_ever, (tmp_path, sender))
        assert receiver.poll(100)
        time.sleep(random() / 2)
        process.kill()
        process.join()
        engine = make_engine(40, num_host_blocks=40, open_disk=threaded_disk(tmp_path, 60))
        assert len(engine.scheduler.tier.disk.blocks) > 0
        for number in range(35):
            answer(engine, [number % 5, *PROMPT[number % 7 :]])
        assert disk_of(engine).loaded.blocks > 0
        check_empty(engine)
        engine.close()


def test_an_abort_while_blocks_are_read(tmp_path: Path) -> None:
    """The blocks arrive, and serve the next request; a second one that waits for them goes on."""
    engine = make_engine(8, num_host_blocks=9, open_disk=late_disk(tmp_path, 40, num_polls=0))
    for prompt in (PROMPT, *OTHERS):
        answer(engine, prompt)
        settle(engine)
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
    engine = make_engine(16, num_host_blocks=9, open_disk=late_disk(tmp_path, 60, num_polls=0))
    for prompt in (PROMPT, *OTHERS, OTHERS[0][::-1], OTHERS[1][1:]):
        answer(engine, prompt)
        settle(engine)
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
    keys = answer(engine, PROMPT).block_keys(0, FULL // BLOCK, BLOCK)
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


def test_no_request_waits_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(8, num_host_blocks=9, open_disk=late_disk(tmp_path, 40, num_polls=0))
    for prompt in (PROMPT, *OTHERS):
        answer(engine, prompt)
        settle(engine)
    disk = disk_of(engine)
    disk._files.blocks._num_polls = 10**12
    monkeypatch.setattr(disk_offload, "_MOST_SECONDS", 0.2)
    for prompt in (PROMPT, OTHERS[0], OTHERS[1]):
        assert answer(engine, prompt).num_cached_tokens < FULL
    assert disk._num_reads == 1
    for transfer in disk._files.blocks.busy.values():  # the disk is back
        transfer._num_polls = 0
    check_empty(engine)


def test_nothing_is_kept_after_a_reset(tmp_path: Path) -> None:
    engine = make_engine(8, num_host_blocks=9, open_disk=late_disk(tmp_path, 40, num_polls=30))
    for prompt in (PROMPT, *OTHERS):
        answer(engine, prompt)
    engine.reset()
    check_empty(engine)
    assert len(engine.scheduler.tier.disk.blocks) == 0
    assert answer(engine, PROMPT).num_cached_tokens == 0
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
