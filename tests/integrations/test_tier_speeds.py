"""The speeds that decide between loads and prefills: the rule with given ones, and how they are measured."""

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcpmla import LLM, SamplingParams
from dcpmla.cache.disk_folder import DiskFolder
from dcpmla.cache.host import HostMemory
from dcpmla.config import DCPConfig
from dcpmla.integrations import loading, tier_speeds
from dcpmla.integrations.model_size import read_model
from dcpmla.integrations.tier_speeds import Line, TierSpeeds, measure
from dcpmla.parallel.mesh import init_mesh
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.machine import H200X8
from dcpmla.planning.prefill import PrefillCosts
from dcpmla.planning.setting import Setting
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import Request
from tests.cache.test_host import new_cache
from tests.integrations.test_disk_offloading import PROMPTS, engine_on
from tests.support.disk import IDENTITY
from tests.support.layouts import dcp_config
from tests.support.models import save_tiny, tiny_config
from tests.support.plan_cases import read_v3
from tests.support.ranks import run_ranks

PIECES: Any = SimpleNamespace(piece_us=lambda new, context: new * (1 + context / 1000))
PLAN: Any = SimpleNamespace(block_tokens=16, bytes_per_block=1000, bytes_per_state=0)


def test_lines() -> None:
    assert Line.through({10.0: 7.0, 30.0: 11.0}) == (5.0, 0.2)
    assert Line.through({10.0: 7.0, 30.0: 6.0}) == (7.0, 0.0), "noise: no time is negative"
    assert Line.through({10.0: 1.0, 30.0: 9.0}) == (0.0, 0.4)
    assert Line.through({10.0: 5.0}) == (0.0, 0.5)
    assert Line.through({0.0: 5.0}) == (5.0, 0.0)


def test_the_rule() -> None:
    """Computing costs a share of a step's start; the disk's blocks are read into host memory first."""
    speeds = TierSpeeds(copy=Line(10.0, 0.001), read=Line(100.0, 0.01), prefill=Line(800.0, 0.1), num_tokens=100)
    host, disk = speeds.costs(PLAN, PIECES, 80, logs=False)
    assert host.load_us(33) == pytest.approx(10 + 0.001 * 3000)
    assert disk.load_us(33) == pytest.approx(110 + 0.011 * 3000)
    # A token costs 10.1 us at the start, and 10.2 after 1,000 others.
    assert [host.should_load(tokens, 0) for tokens in (1, 2)] == [False, True]
    assert [disk.should_load(tokens, 0) for tokens in (11, 12)] == [False, True]
    slow, _ = TierSpeeds(Line(0.0, 1.0), Line(0.0, 0.0), Line(0.0, 1.0), 100).costs(PLAN, PIECES, 80, logs=False)
    assert [slow.should_load(160, context) for context in (0, 70_000)] == [False, True]


def pieces_of(model: Any) -> PrefillCosts:
    return PrefillCosts(Deployment(H200X8, model, Setting(tp=1, dcp=1, kv_cache_dtype="bf16")), 8192)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "kimi_linear"])
@pytest.mark.parametrize("num_tokens", [1, 64, 500, 100_000])
def test_tokens_take_the_measured_time(family: str, num_tokens: int) -> None:
    """In tiny models the planner's time is that of launches, the same for a token and for many."""
    pieces = pieces_of(read_model(tiny_config(family)))
    speeds = TierSpeeds(Line(0.0, 0.0), Line(0.0, 0.0), Line(800.0, 3.0), 500)
    costs, _ = speeds.costs(PLAN, pieces, 100, logs=False)
    least_us = num_tokens * (3.0 + 8.0)
    assert costs._prefill_us(num_tokens, 0) >= least_us
    assert num_tokens > 500 or costs._prefill_us(num_tokens, 0) == pytest.approx(least_us)
    assert costs._prefill_us(num_tokens, 10_000) >= costs._prefill_us(num_tokens, 0)


@pytest.mark.parametrize(("new", "context"), [(64, 0), (2048, 0), (2048, 100_000), (64, 100_000), (100_000, 0)])
def test_the_planner_s_machine_takes_the_planner_s_time(new: int, context: int) -> None:
    pieces = pieces_of(read_v3())
    line = Line(0.0, pieces.piece_us(2048, 0) / 2048)
    costs, _ = TierSpeeds(Line(0.0, 0.0), Line(0.0, 0.0), line, 2048).costs(PLAN, pieces, 8192, logs=False)
    assert costs._prefill_us(new, context) == pytest.approx(pieces.piece_us(new, context), rel=0.25)


def measure_on_ranks(folder: Path | None) -> tuple[TierSpeeds, list[int]]:
    """On one rank: return the speeds where the second rank takes longer, and the sizes of what was timed."""
    mesh, sizes = init_mesh(dist.get_world_size(), 1), list[int]()
    cache = new_cache("deepseek_v3", "auto", 6)
    memory = HostMemory(cache)
    memory.allocate(4, 0)

    def take(run: Any, size: int) -> float:
        sizes.append(size)
        run(size)
        return (1 + dist.get_rank()) * (100.0 + size)

    tier_speeds._least_us = take
    disk = None if folder is None else DiskFolder(folder, IDENTITY)
    return measure(cache.sizes, memory, 4, disk, lambda num_tokens: None, 1000, mesh), sizes


def test_all_ranks_have_the_slowest_one_s_speeds(tmp_path: Path) -> None:
    """Prompts grow until one takes three times the shortest one's time. The disk keeps no file."""
    results = run_ranks(2, measure_on_ranks, tmp_path / "disk")
    (speeds, sizes), (others, _) = results
    assert speeds == others
    assert sizes == [1, 4, 1, 4, 16, 64, 256]
    assert speeds.num_tokens == 256
    assert speeds.prefill == pytest.approx((200.0, 2.0))
    assert speeds.read == pytest.approx((200.0, speeds.copy.slope))
    assert [path.suffix for path in (tmp_path / "disk").rglob("*") if path.is_file()] == [".json"]
    ((alone, sizes),) = run_ranks(1, measure_on_ranks, None)
    assert (alone.read, sizes[:3]) == ((0.0, 0.0), [1, 4, 16])


def test_a_full_disk_gets_the_planner_s_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(tier_speeds, "BlockFile", refuse)
    memory: Any = SimpleNamespace(block_bytes=4096)
    assert tier_speeds._measure_reads(PLAN, memory, 3, DiskFolder(tmp_path, IDENTITY), 0) == (0.0, 1e-3 / 5)


@pytest.mark.parametrize("prefill_us", [1e-9, 1e9])
def test_contexts_that_left_the_cache(
    prefill_us: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 150 tokens all full blocks come back, or a line says why not. Measuring leaves nothing in the cache."""
    save_tiny("deepseek_v3", tmp_path)
    measured: list[TierSpeeds] = []

    def with_prefills(*arguments: Any) -> TierSpeeds:
        measured.append(measure(*arguments))
        return measured[0]._replace(prefill=Line(0.0, prefill_us))

    monkeypatch.setattr(loading, "measure", with_prefills)
    options: dict[str, Any] = {"kv_cache_memory_bytes": 40_000, "kv_offloading_size": 0.01, "block_size": 16}
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    with LLM(str(tmp_path), device="cpu", dtype="float32", max_model_len=200, **options) as llm:
        assert llm.engine.stats.num_steps == 0
        assert llm.engine.allocator.num_free == llm.engine.allocator.num_blocks
        prompts = [[1 + (7 * index + number) % 180 for index in range(150)] for number in range(4)]
        for prompt in (*prompts, prompts[0]):
            (request,) = llm.generate([prompt], params)
        assert llm.engine.cache.sizes.num_blocks < 4 * 9
    assert request.num_cached_tokens == (144 if prefill_us > 1 else 0)
    lines = [record.getMessage() for record in caplog.records if "host memory has" in record.getMessage()]
    assert len(lines) == (0 if prefill_us > 1 else 1)
    (speeds,) = measured
    assert speeds.read == (0.0, 0.0)
    assert all(max(line) > 0 for line in (speeds.copy, speeds.prefill))  # which of the two numbers: noise may decide
    assert torch.tensor([*speeds.copy, *speeds.prefill]).isfinite().all()


def serve_slowly(model: Path, disk: Path, dcp: DCPConfig) -> tuple[list[int], list[str]]:
    """On one rank of a machine whose copies are slow: return numbers of cached tokens of a conversation that is in host
    memory, and lines of the log.
    """
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dcpmla").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "measure", lambda *_: TierSpeeds(Line(1e9, 0.0), Line(0.0, 0.0), Line(0.0, 1.0), 16))
        engine = engine_on(model, disk, dcp)

    def serve() -> Request:
        request = engine.add(PROMPTS[0], SamplingParams(max_new_tokens=2, ignore_eos=True))
        list(engine.run())
        return request

    served = [serve()]
    for _ in range(2):
        settle(engine)
        engine.allocator.reset()
        served.append(serve())
    engine.close()
    return [request.num_cached_tokens for request in served], lines


def settle(engine: Engine) -> None:
    """Step until all blocks are stored."""
    while True:
        engine.step()
        if not engine.has_transfers and not engine.scheduler.tier.num_pending:
            return


def test_the_first_rank_says_what_was_found_and_not_loaded(tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path / "model")
    layout = dcp_config(2, 2, 1, block_size=4)
    for _ in range(2):
        first, second = run_ranks(2, serve_slowly, tmp_path / "model", tmp_path / "disk", layout, timeout=300)
    assert first[0] == second[0] == [0, 0, 0]
    assert not second[1]
    assert sorted(line.partition(" has ")[0] for line in first[1]) == ["host memory", "the disk"]
    words = (
        r"56 tokens of a request, but loading them takes 1000000\.00 ms and computing them again \d+\.\d\d ms, by the "
    )
    assert all(re.search(f"{words}speeds measured at the start", line) for line in first[1])
