"""Rotation against the functions of transformers' own models, in both layouts."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb, apply_rotary_pos_emb_interleave
from transformers.models.mistral4.modeling_mistral4 import get_llama_4_attn_scale

from dcpmla.attention.mla.latent_spec import llama_4_factor
from dcpmla.attention.projections import apply_rope

T, H, R = 7, 3, 8


def angles(num_tokens: int = T, width: int = R, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos, sin [T, R / 2] of random positions, times YaRN's factor."""
    theta = 100 * torch.rand(num_tokens, width // 2)
    return factor * theta.cos(), factor * theta.sin()


def deinterleave(x: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1) -> halves (i, i + R / 2)."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], -1)


def as_batch(x: Tensor) -> Tensor:
    """[T, R] or [T, h, R] -> transformers' [1, h, T, R]."""
    return x.view(len(x), -1, x.shape[-1]).transpose(0, 1)[None]


def deepseek_v3s(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
    """Rotate pairs, which it leaves split into halves, or halves."""
    doubled = [torch.cat([table, table], -1)[None] for table in (cos, sin)]
    rotate = apply_rotary_pos_emb_interleave if is_interleaved else apply_rotary_pos_emb
    return rotate(as_batch(x), as_batch(x), *doubled)[0]


@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize("shape", [(T, R), (T, H, R), (1, 1, R), (1, R)])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_is_transformers(interleaved: bool, shape: tuple[int, ...], factor: float) -> None:
    """DeepSeek-V2's pairs are where they were, as here."""
    x, (cos, sin) = torch.randn(shape), angles(shape[0], factor=factor)
    rotated = apply_rope(x, torch.cat([cos, sin], -1), interleaved)
    assert rotated.shape == x.shape
    found = as_batch(deinterleave(rotated) if interleaved else rotated)
    torch.testing.assert_close(found, deepseek_v3s(x, cos, sin, interleaved), atol=1e-6, rtol=1e-6)
    if interleaved:
        expected, _ = apply_rotary_emb(as_batch(x), as_batch(x), torch.complex(cos, sin)[None])
        torch.testing.assert_close(as_batch(rotated), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rows_are_rotated_in_float32_at_least_and_rounded_once(interleaved: bool, dtype: torch.dtype) -> None:
    """The rope part is cut out of a wider projection, and stays as it was."""
    wide, (cos, sin) = torch.randn(T, H, 5 + R).to(dtype), angles()
    tables, kept = torch.cat([cos, sin], -1), wide.clone()
    rotated = apply_rope(wide[..., 5:], tables, interleaved)
    assert rotated.dtype == dtype
    exact = apply_rope(wide[..., 5:].contiguous().to(torch.promote_types(dtype, torch.float32)), tables, interleaved)
    assert torch.equal(rotated, exact.to(dtype))
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
    assert factor.shape == (len(positions),)
    theirs = get_llama_4_attn_scale(torch.tensor([positions]), beta, original)[0, 0, :, 0]
    torch.testing.assert_close(factor, theirs, atol=1e-6, rtol=1e-6)
    by_hand = [1 + beta * math.log(1 + position // original) for position in positions]
    torch.testing.assert_close(factor.double(), torch.tensor(by_hand, dtype=torch.float64), atol=1e-5, rtol=1e-5)
