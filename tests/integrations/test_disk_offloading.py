"""Conversations that continue after a restart of the engine, from files on a disk: transformers' tokens."""

import functools
import logging
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from dcpmla.cache.disk_file import RECORD_BYTES
from dcpmla.config import DCPConfig
from dcpmla.integrations import loading
from dcpmla.integrations.engine_maker import EngineMaker
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.offloading import _common, check_scales
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.made_steps import made_steps
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.warm_up import warm_up
from tests.support.layouts import dcp_config
from tests.support.models import VOCAB_SIZE, save_tiny
from tests.support.oracle import Oracle
from tests.support.ranks import run_ranks
from tests.support.whole_models import load_engine_on_rank

PROMPTS = [[1 + (number * 7 + index * index) % (VOCAB_SIZE - 2) for index in range(61)] for number in range(3)]


def engine_on(model: Path, disk: Path, dcp: DCPConfig, device_type: str = "cpu") -> Engine:
    """Return one rank's engine with host memory and files."""
    options = EngineOptions(
        kv_cache_memory_bytes=1 << 23,
        kv_offloading_size=0.03 * dcp.tensor_parallel_size,
        kv_offloading_path=str(disk),
        kv_offloading_disk_size=0.04 * dcp.tensor_parallel_size,
        max_num_seqs=4,
        max_num_batched_tokens=16,  # many steps, so that loads pay on all machines
        dtype="float32",
    )
    return load_engine_on_rank(model, dcp, options, 160, device_type)


def converse(
    model: Path, disk: Path, dcp: DCPConfig, conversations: list[list[int]], device_type: str = "cpu"
) -> tuple[list[list[int]], list[int], list[str]]:
    """On one rank: return answers, numbers of their cached tokens, and lines of the log but for speeds."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dcpmla").addHandler(handler)
    logging.getLogger("dcpmla").setLevel(logging.INFO)
    engine = engine_on(model, disk, dcp, device_type)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    requests = [engine.add(list(conversation), params) for conversation in conversations]
    list(engine.run())
    assert engine.allocator.num_free == engine.allocator.num_blocks
    engine.close()
    lines = [line for line in lines if not line.startswith("measured on a rank: ")]
    return [request.token_ids for request in requests], [request.num_cached_tokens for request in requests], lines


def converse_after_warm_up(
    model: Path, disk: Path, dcp: DCPConfig, conversations: list[list[int]]
) -> tuple[list[list[int]], list[int], list[str], int]:
    """On one rank: `converse` after a warm-up, as GPUs have it; return the number of blocks on the disk, too."""
    engines: list[Engine] = []

    def watch(engine: Engine, _: object) -> None:
        warm_up(engine, made_steps(engine))
        for token in range(1, 9):  # more than the cache holds, so that blocks leave it
            engine.add([token] * 100, SamplingParams(max_new_tokens=1))
        list(engine.run())
        assert engine.offload is not None
        assert len(engine.offload.tier.blocks) > 0
        engines.append(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineMaker, "needs_warm_up", True)
        patch.setattr(EngineMaker, "rehearse", lambda *_: [])
        patch.setattr(loading, "warm_up", watch)
        results = converse(model, disk, dcp, conversations)
    assert len(engines) == 1
    (file,) = disk.glob(f"*/rank{dist.get_rank()}.0.index")
    content = file.read_bytes()
    records = [content[at : at + RECORD_BYTES] for at in range(0, len(content), RECORD_BYTES)]
    return *results, sum(map(any, records))


def check(reference: Any, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Assert that answers are transformers' own."""
    oracle = Oracle(reference)
    for prompt, tokens in zip(prompts, answers, strict=True):
        oracle.check_tokens(prompt, tokens)


@pytest.mark.parametrize(("family", "tp"), [("deepseek_v3", 1), ("kimi_linear", 2)])
def test_a_warm_up_neither_forgets_nor_writes_what_disks_have(family: str, tp: int, tmp_path: Path) -> None:
    reference = save_tiny(family, tmp_path / "model")
    layout = dcp_config(tp, tp, 1, block_size=4)
    serve = functools.partial(
        run_ranks, tp, converse_after_warm_up, tmp_path / "model", tmp_path / "disk", layout, timeout=300
    )
    results = serve(PROMPTS)
    prompts = [prompt + answer + [5, 6, 7] for prompt, answer in zip(PROMPTS, results[0][0], strict=True)]
    num_blocks = [len(PROMPTS) * ((len(each[0]) + 5) // layout.virtual_block_size) for each in (PROMPTS, prompts)]
    assert all(num_written == num_blocks[0] for *_, num_written in results)
    for answers, num_cached, lines, num_written in serve(prompts):
        check(reference, prompts, answers)
        assert all(number >= len(PROMPTS[0]) - layout.virtual_block_size for number in num_cached), num_cached
        assert not lines
        assert num_written == num_blocks[1]


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear", "deepseek_v4"])
@pytest.mark.parametrize(
    ("tp", "dcp"), [pytest.param(1, 1, marks=pytest.mark.gpu), pytest.param(2, 2, marks=pytest.mark.gpu_2)]
)
def test_conversations_continue_on_gpus(family: str, tp: int, dcp: int, tmp_path: Path) -> None:
    reference = save_tiny(family, tmp_path / "model")
    layout = dcp_config(tp, dcp, block_size=16 // dcp)
    serve = functools.partial(run_ranks, tp, converse, tmp_path / "model", tmp_path / "disk", layout, device="cuda")
    ((answers, num_cached, lines), *_) = serve(PROMPTS, "cuda")
    assert not any(num_cached)
    assert not lines
    prompts = [prompt + answer + [5, 6, 7] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    for answers, num_cached, lines in serve(prompts, "cuda"):
        check(reference, prompts, answers)
        assert all(num_cached), num_cached
        assert not lines


def test_another_layout_is_a_miss_and_said_once(tmp_path: Path) -> None:
    reference = save_tiny("deepseek_v3", tmp_path / "model")
    serve = functools.partial(run_ranks, 2, converse, tmp_path / "model", tmp_path / "disk", timeout=300)
    serve(dcp_config(2, 2, 1, block_size=4), PROMPTS)
    results = serve(dcp_config(2, 2, 2, block_size=4), PROMPTS)
    for answers, num_cached, _ in results:
        check(reference, PROMPTS, answers)
        assert not any(num_cached)
    (line,) = [line for *_, lines in results for line in lines]
    assert "they have layout 'tp 2, dcp 2, interleave 1, block size 4' instead of 'tp 2, dcp 2, interleave 2" in line
    assert f"--kv-offloading-path) is {tmp_path / 'disk'}, whose blocks" in line


def test_another_model_is_a_miss(tmp_path: Path) -> None:
    """Its config is the same, and one of its weights differs."""
    save_tiny("deepseek_v3", tmp_path / "model")
    layout = dcp_config(1, 1, 1, block_size=4)
    serve = functools.partial(run_ranks, 1, converse, tmp_path / "model", tmp_path / "disk", layout, PROMPTS)
    ((_, first, _),) = serve()
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("layers.1.mlp.shared_experts.up_proj.weight"))
    tensors[name][0, 0] += 1
    save_file(tensors, weights, {"format": "pt"})
    ((_, num_cached, lines),) = serve()
    assert not any(first + num_cached)
    assert "they have other weights" in lines[0]
    ((_, num_cached, lines),) = serve()
    assert all(num_cached)
    assert not lines


@pytest.mark.parametrize("damage", ["a bit of each block", "another rank's file"])
def test_one_rank_s_damaged_file_is_a_miss_on_all(damage: str, tmp_path: Path) -> None:
    """tests/cache/test_disk_file.py has other kinds of damage."""
    reference = save_tiny("deepseek_v3", tmp_path / "model")
    layout = dcp_config(2, 2, 1, block_size=4)
    serve = functools.partial(run_ranks, 2, converse, tmp_path / "model", tmp_path / "disk", layout, PROMPTS)
    serve()
    files = {int(path.name[4]): path for path in (tmp_path / "disk").glob("*/rank?.0.blocks")}
    content, block = bytearray(files[1].read_bytes()), 4096
    used = [start for start in range(0, len(content), block) if any(content[start : start + block])]
    assert len(used) > 15
    if damage == "a bit of each block":
        for start in used:
            content[start + 77] ^= 4
    else:
        content = bytearray(files[0].read_bytes())
        files[1].with_suffix(".index").write_bytes(files[0].with_suffix(".index").read_bytes())
    files[1].write_bytes(content)
    results = serve()
    for answers, num_cached, _ in results:
        check(reference, PROMPTS, answers)
        assert not any(num_cached)
    if damage == "another rank's file":
        (line,), others = (lines for *_, lines in results)
        assert re.fullmatch(r"(\d+) of \1 blocks on the disk are not used: other ranks lack them", line)
        assert not others
    for answers, num_cached, _ in serve():  # damaged blocks have been written again
        check(reference, PROMPTS, answers)
        assert all(num_cached)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kv_offloading_path": "/d", "kv_offloading_disk_size": 1},
            r"kv_offloading_path \(--kv-offloading-path\) is '/d'; .* kv_offloading_size \(--kv-offloading-size\) must",
        ),
        (
            {"kv_offloading_path": "/d", "kv_offloading_size": 1},
            r"\(--kv-offloading-path\) is '/d' and .*--kv-offloading-disk-size\) is None; give both or neither",
        ),
        ({"kv_offloading_disk_size": 1, "kv_offloading_size": 1}, r"is None and .* is 1; give both or neither"),
        ({"kv_offloading_disk_size": 0}, r"kv_offloading_disk_size \(--kv-offloading-disk-size\) is 0; it must be"),
        ({"kv_offloading_path": ""}, r"kv_offloading_path \(--kv-offloading-path\) is ''; it must be"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineOptions(**options)


def test_scales_of_first_prompts_are_refused() -> None:
    options = EngineOptions(kv_offloading_size=1, kv_offloading_path="/d", kv_offloading_disk_size=1)
    with pytest.raises(ValueError, match=r"--kv-offloading-path\) .*--calculate-kv-scales\); give kv_cache_scale"):
        check_scales(DCPConfig(kv_cache_dtype="fp8", calculate_kv_scales=True), options)
    check_scales(DCPConfig(), options)


def compare_many(num_blocks: int) -> tuple[int, bool]:
    """On one rank: return the number of common blocks of files with other blocks at the end, and whether they are in
    the first rank's order.
    """
    rank = dist.get_rank()
    stored = {sha256(b"%d" % number).digest(): number for number in range(num_blocks)}
    stored |= {sha256(b"%d %d" % (rank, number)).digest(): num_blocks + number for number in range(1000)}
    stored[sha256(b"7").digest()] = 2 * num_blocks + rank
    if rank:
        stored = dict(reversed(stored.items()))
    common = _common(stored, dist.group.WORLD)
    return len(common), list(common.values()) == sorted(common.values())


def test_many_blocks_are_compared() -> None:
    assert run_ranks(2, compare_many, 250_000) == [(249_999, True)] * 2
