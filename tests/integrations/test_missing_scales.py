"""The warning of scales of fp8 caches that a checkpoint lacks: one line, only about layers that use scales."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcpmla.config import DCPConfig
from dcpmla.integrations.engine_options import EngineOptions
from tests.support.models import save_tiny
from tests.support.plain_eagle3 import PlainEagle3, base_model
from tests.support.ranks import run_ranks
from tests.support.whole_models import load_engine_on_rank


def add_scales(directory: Path, layers: list[int]) -> None:
    """Give layers of a saved model a scale of the cache."""
    file = directory / "model.safetensors"
    scales = {f"model.layers.{layer}.self_attn.attn.k_scale": torch.tensor(0.5) for layer in layers}
    save_file(load_file(file) | scales, file)


def warnings(model: Path, head: Path | None) -> list[str]:
    """On a rank: load an engine whose cache is in fp8; return the warnings of scales."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dcpmla").addHandler(handler)
    drafts = {} if head is None else {"speculative_method": "eagle3", "speculative_model": str(head)}
    options = EngineOptions(
        dtype="float32", kv_cache_memory_bytes=1 << 22, max_num_batched_tokens=64, max_num_seqs=4, **drafts
    )
    load_engine_on_rank(model, DCPConfig(kv_cache_dtype="fp8"), options, 64).close()
    return [line for line in lines if "scale" in line]


@pytest.mark.parametrize(("layers", "num_lines"), [([], 1), ([1], 1), ([1, 3], 0)])
def test_layers_of_linear_attention_need_no_scale(layers: list[int], num_lines: int, tmp_path: Path) -> None:
    """Of these four layers the second and the last attend to latents."""
    save_tiny("kimi_linear", tmp_path)
    add_scales(tmp_path, layers)
    (lines,) = run_ranks(1, warnings, tmp_path, None)
    assert len(lines) == num_lines
    assert all("layers have no kv_scale in their checkpoint" in line for line in lines)


@pytest.mark.parametrize(("of_model", "is_dense", "num_lines"), [(True, True, 0), (True, False, 1), (False, False, 1)])
def test_heads_of_eagle3(of_model: bool, is_dense: bool, num_lines: int, tmp_path: Path) -> None:
    """A head with keys and values of heads has no scale; one of MLA has, and shares its model's line."""
    base = base_model()
    base.save_pretrained(tmp_path / "model")
    if of_model:
        add_scales(tmp_path / "model", [*range(base.config.num_hidden_layers)])
    head = PlainEagle3(base, (2, 3, 4), is_dense=is_dense).save(tmp_path / "head", has_embedding=True)
    (lines,) = run_ranks(1, warnings, tmp_path / "model", head)
    assert len(lines) == num_lines
