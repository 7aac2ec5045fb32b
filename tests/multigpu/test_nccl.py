"""The CPU tests' checks repeated on GPUs: exchanges over NCCL, transformers' logits in float32, random loads."""

from pathlib import Path
from typing import Any

import pytest

from tests.comm.test_exchange import check_combine, check_gathers
from tests.integrations.test_load import check_loads
from tests.integrations.test_transformers import check, make_cases
from tests.parallel.test_mesh import check_values
from tests.support.deepseek_v41_files import save_v41
from tests.support.gpus import on_gpus
from tests.support.models import FAMILIES, save_tiny
from tests.support.ranks import run_ranks


@pytest.fixture(autouse=True)
def _exact_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # ranks inherit it


@on_gpus(2, 4, 8)
@pytest.mark.parametrize("check_exchange", [check_combine, check_gathers])
def test_exchange(num_gpus: int, check_exchange: Any) -> None:
    run_ranks(num_gpus, check_exchange, "cuda", device="cuda")


@on_gpus(2, 4, 8)
def test_values_of_all_ranks(num_gpus: int) -> None:
    run_ranks(num_gpus, check_values, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_one_gpu(family: str, tmp_path: Path) -> None:
    cases = make_cases(1, [1], (1, 2), ("auto",), family == "deepseek_v4")
    check(save_tiny(family, tmp_path), tmp_path, 1, cases, "cuda")


@on_gpus(1, 2, 4, 8)
def test_deepseek_v41(num_gpus: int, tmp_path: Path) -> None:
    """Shared entries, candidate blocks and memories of n-grams, unquantized and as published."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "q_lora_rank": 128, "engram_layer_ids": [1, 4]}
    cases = make_cases(num_gpus, [num_gpus], (1, 2), ("auto",), is_compressed=True)
    for is_quantized in (False, True):
        directory = tmp_path / str(is_quantized)
        check(save_v41(directory, is_quantized, **sizes), directory, num_gpus, cases, "cuda")


@on_gpus(2, 4, 8)
@pytest.mark.parametrize("family", ["deepseek_v3", "longcat_flash", "mistral4", "deepseek_v4"])
def test_logits_and_tokens(num_gpus: int, family: str, tmp_path: Path) -> None:
    is_v4 = family == "deepseek_v4"
    cases = make_cases(num_gpus, [num_gpus], (1, 16), ("ag_rs", "a2a", "direct"), is_v4)
    cases += make_cases(num_gpus, [num_gpus // 2], (2,), ("auto",), is_v4)
    check(save_tiny(family, tmp_path), tmp_path, num_gpus, cases, "cuda")


@on_gpus(2, 4, 8)
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v4"])
def test_loads(num_gpus: int, family: str, tmp_path: Path) -> None:
    # Over eight ranks, DeepSeek-V4's smallest block has 64 tokens: too many for requests that outgrow their blocks.
    dcp_size = min(num_gpus, 4) if family == "deepseek_v4" else num_gpus
    check_loads(num_gpus, dcp_size, 1, tmp_path, "cuda", family)
