"""What a start says, for every family: no layer, format or option makes it fail, and each line has its reason."""

from pathlib import Path
from typing import Any

import pytest

from dcpmla import LLM
from dcpmla.cli.start_report import start_lines
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.open_model import open_model
from tests.support.models import FAMILIES, save_tiny

pytestmark = pytest.mark.usefixtures("one_process_on_cpu")


def lines_of(model: Path, **options: Any) -> list[str]:
    """Return the lines on an engine on one CPU rank."""
    with LLM(model, device="cpu", max_num_seqs=4, **options) as llm:
        engine_options = EngineOptions.of({"max_num_seqs": 4, **options})
        return start_lines(llm._job, open_model(str(model)), llm.engine, llm.exchange, engine_options, False)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_lines(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    lines = lines_of(tmp_path)
    starts = [line.partition(":")[0] for line in lines]
    assert [start for start in starts if not start.startswith("attention, ")] == [
        *("model", "ranks", "layout", "cache", "room", "exchange", "CUDA graphs", "steps")
    ]
    assert all(line.partition(": ")[2] for line in lines)


def test_lines_of_options(tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path / "model")
    formats: dict[str, Any] = {"kv_cache_dtype": "fp8", "attention_backend": "torch", "enforce_eager": True}
    tiers: dict[str, Any] = {"kv_offloading_size": 0.01, "kv_offloading_path": str(tmp_path / "disk")}
    lines = lines_of(
        tmp_path / "model", **formats, **tiers, kv_offloading_disk_size=0.02, kv_cache_memory_bytes=1 << 20
    )
    text = "\n".join(lines)
    assert "attention, decode: torch, as asked for" in lines
    assert "attention, prefill: torch, the first that takes its calls" in lines
    assert "; the cache's size is --kv-cache-memory-bytes 1,048,576" in text
    assert "host memory: 0.01 GiB (--kv-offloading-size) for " in text
    assert f"disk: 0.02 GiB in {tmp_path / 'disk'} for " in text
    assert lines[-1].endswith("found 0 blocks of earlier jobs")


def test_lines_of_hot_tokens(tmp_path: Path) -> None:
    save_tiny("deepseek_v32", tmp_path)
    lines = lines_of(tmp_path, kv_hot_tokens=30, kv_offloading_size=0.01, kv_cache_memory_bytes=10**9)
    (line,) = [line for line in lines if line.startswith("host memory: ")]
    assert line.endswith(
        "of --kv-offloading-size 0.01 GiB for all; on the GPUs index keys, and latents of 30 tokens a "
        "layer (--kv-hot-tokens)"
    )


def test_a_cache_without_room_for_the_longest_says_so(tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path)
    (room,) = [line for line in lines_of(tmp_path, kv_cache_memory_bytes=1 << 14) if line.startswith("room: ")]
    assert room.startswith("room: no request of the longest, ")
