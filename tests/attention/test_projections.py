"""Rounding of norms and RoPE, Mistral 4's factor, and operators as tracing sees them. `test_layer` compares what the
torch code computes with transformers.
"""

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.mistral4.modeling_mistral4 import get_llama_4_attn_scale

from dcpmla.attention import projections
from dcpmla.attention.mla.latent_spec import llama_4_factor
from dcpmla.attention.mla.prefill import read_cache_rows
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.comm.nccl import merge_rows, weigh_rows
from tests.attention.test_small_kernels import BLOCK_SIZE, DTYPES, NUM_BLOCKS, ODD, latents_case, query_case
from tests.support.kernels import cut, on, on_both, randn


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_rounds_as_transformers(dtype: torch.dtype) -> None:
    theirs = DeepseekV3RMSNorm(40, eps=1e-3).to(dtype)
    theirs.weight.data = 0.5 + randn(40, dtype=dtype).abs()
    x = cut(randn(9, 40, dtype=dtype, seed=1))
    assert torch.equal(projections.rms_norm(x, theirs.weight.data, 1e-3), theirs(x).detach())


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rows_are_rotated_in_float32_at_least_and_rounded_once(interleaved: bool, dtype: torch.dtype) -> None:
    """The rope part is cut out of a wider projection, and stays as it was."""
    wide, cos_sin = randn(7, 3, 13, dtype=dtype), randn(7, 8, seed=1)
    kept = wide.clone()
    rotated = projections.apply_rope(wide[..., 5:], cos_sin, interleaved)
    assert rotated.dtype == dtype
    wider = wide[..., 5:].contiguous().to(torch.promote_types(dtype, torch.float32))
    assert torch.equal(rotated, projections.apply_rope(wider, cos_sin, interleaved).to(dtype))
    assert torch.equal(wide, kept)


@example(positions=[0, 15, 16, 31, 32], beta=0.5, original=16)  # steps at multiples
@given(
    positions=st.lists(st.integers(0, 2**22), min_size=1, max_size=8),
    beta=st.sampled_from([0.1, 0.3, 1.0]),
    original=st.sampled_from([16, 100, 8192]),
)
def test_llama_4_factor_is_mistral_4s(positions: list[int], beta: float, original: int) -> None:
    factor = llama_4_factor(torch.tensor(positions), beta, original)
    assert factor.dtype == torch.float32
    theirs = get_llama_4_attn_scale(torch.tensor([positions]), beta, original)[0, 0, :, 0]
    torch.testing.assert_close(factor, theirs, atol=1e-6, rtol=1e-6)


@on_both
def test_operators(device: str) -> None:
    """Check schema, shapes and strides that tracing is told, what is written: `torch.library.opcheck`."""
    for slots in ([3, -1, 0], []):
        for sizes, rope in itertools.product((ODD, (0, *ODD[1:])), (True, False)):
            torch.library.opcheck(
                projections.norm_rope_cache.op, on(device, latents_case(sizes, slots, torch.float32, rope, True))
            )
        mixed = latents_case(ODD, slots, torch.bfloat16, True, True)
        mixed = mixed._replace(q_weight=mixed.q_weight.float(), kv_weight=mixed.kv_weight.float())
        torch.library.opcheck(projections.norm_rope_cache.op, on(device, mixed))
        queries = on(device, query_case(ODD, len(slots), torch.float32, True, False))
        torch.library.opcheck(projections.absorb_query.op, queries)
        torch.library.opcheck(projections.rotate_query_.op, [queries[0], *queries[2:4]])
        values = ValueProjection(randn(len(slots), 3, 40), randn(3, 17, 40)[:, 12:])
        torch.library.opcheck(projections.project_values.op, on(device, values))
        rows = [randn(NUM_BLOCKS, 2, BLOCK_SIZE, 7)[:, 1], torch.tensor(slots, dtype=torch.int64).abs()]
        torch.library.opcheck(read_cache_rows.op, on(device, rows))
        for num_heads in (1, 3):
            received = randn(2, len(slots), num_heads, 16)  # rows, then their LSE, as the exchange receives them
            torch.library.opcheck(merge_rows.op, on(device, [received[..., :8], received[..., 8]]))
            weighed = [cut(randn(len(slots), 2 * num_heads, 8)), randn(2, len(slots), 2 * num_heads), 1]
            torch.library.opcheck(weigh_rows.op, on(device, weighed))
