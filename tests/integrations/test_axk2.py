"""A.X-K2's gates beyond the tests of all families: their kernels, and a config that they do not go with."""

from dataclasses import replace

import pytest
import torch

from dcpmla.integrations.families.table import attention_of
from dcpmla.model.norm_gate import gate_norm
from tests.attention.test_small_kernels import compile_for_hopper, randn
from tests.support.interpreter import convert_as_torch
from tests.support.models import SPARSE_FAMILIES, tiny_config
from tests.support.shared_memory import run_interpreted

pytestmark = pytest.mark.skipif("axk2" not in SPARSE_FAMILIES, reason="needs a transformers with A.X-K2")


def test_gates_without_query_latents() -> None:
    config = attention_of(tiny_config("axk2")).config
    with pytest.raises(ValueError, match="query_gates is True, which needs a q_lora_rank, .* they are None"):
        replace(config, q_lora_rank=None)


def check_gates(device: str) -> None:
    """Check the norms' kernel against plain torch, also for sizes that are no powers of two."""
    convert_as_torch()
    from dcpmla.model.kernels.norm_gate import gate_norm as gate_norm_kernel

    for num_rows, width, rank in ((3, 48, 6), (70, 256, 16), (5, 136, 130)):
        x, low, up = (
            randn(*shape, seed=i).to(device)
            for i, shape in enumerate(((num_rows, width), (num_rows, rank), (width, rank)))
        )
        got, *codes = gate_norm_kernel(x, low, up, width % 128 == 0)
        expected, *expected_codes = gate_norm.reference(x, low, up, width % 128 == 0)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
        values, want = (
            (parts[0].float().unflatten(1, (-1, 128)) * parts[1][..., None] if width % 128 == 0 else parts[0].float())
            for parts in (codes, expected_codes)
        )
        torch.testing.assert_close(values, want, atol=1e-2, rtol=0.07)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(1, check_gates, "cpu")


@pytest.mark.gpu
def test_kernels() -> None:
    check_gates("cuda")


def test_kernels_compile_for_hopper() -> None:
    pytest.importorskip("triton")
    from dcpmla.model.kernels.norm_gate import gate_kernel as norm_kernel

    sizes = {"WIDTH": 2048, "RANK": 16, "ROWS": 64, "RANKS": 16}
    compile_for_hopper(norm_kernel, "bf16", sizes, codes_ptr="*fp8e4nv", scales_ptr="*fp32")
