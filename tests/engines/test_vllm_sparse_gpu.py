"""Sparse MLA in vLLM with this package's selection and attention on GPUs, where vLLM is installed: eagerly and in full
graphs of decode, against transformers in float32.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV32ForCausalLM

from tests.engines.sparse_model import save_sparse_model
from tests.engines.test_vllm_gpu import EAGER, GRAPHS, OURS, TOLERANCE, largest_difference, logprobs_of

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
PROMPTS = [[2 + (7 * i + 3 * n) % 500 for i in range(n)] for n in (1, 5, 33, 64, 300)]  # those of `logprobs_of`


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose tokens leave out a few keys: roundings in 8 bits tip some choices."""
    return save_sparse_model(tmp_path_factory.mktemp("sparse"), num_heads=16, head_dim=128, topk=256)


@pytest.fixture(scope="module")
def expected(sparse_model: Path) -> Tensor:
    """Return transformers' logprobs [5 prompts, 16 new tokens, 512] of greedy answers."""
    model = DeepseekV32ForCausalLM.from_pretrained(sparse_model, dtype=torch.float32, attn_implementation="eager")
    rows = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            tokens, found = list(prompt), []
            for _ in range(16):
                found.append(model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1))
                tokens.append(int(found[-1].argmax()))
            rows.append(torch.stack(found))
    return torch.stack(rows)


def check(model: Path, expected: Tensor, tolerance: float, **options: Any) -> list[str]:
    """Check engines that run eagerly and in graphs; return what they logged."""
    found, logs = logprobs_of(model, *(each | OURS | options for each in (EAGER, GRAPHS)))
    differences = [largest_difference(each, expected) for each in found]
    assert max(differences) < tolerance, differences
    return logs


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cache", "tolerance"), [("auto", TOLERANCE), ("fp8", 2 * TOLERANCE), ("fp8_ds_mla", 2 * TOLERANCE)]
)
def test_one_gpu(sparse_model: Path, expected: Tensor, cache: str, tolerance: float) -> None:
    check(sparse_model, expected, tolerance, kv_cache_dtype=cache)


@pytest.mark.gpu_2
@pytest.mark.parametrize("interleave", [1, 64])
def test_two_gpus(sparse_model: Path, expected: Tensor, interleave: int) -> None:
    layout = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": interleave}
    logs = check(sparse_model, expected, TOLERANCE, **layout, block_size=64)
    assert all("dcpmla: exchange direct" in log for log in logs)
