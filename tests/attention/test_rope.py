"""Rotation against the functions of transformers' own models, in both layouts."""

import math

import pytest
import torch
from hypothesis import given
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


@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize("shape", [(T, R), (T, H, R), (1, 1, R), (1, R)])
def test_interleaved_is_deepseek_v3s(shape: tuple[int, ...], factor: float) -> None:
    x, (cos, sin) = torch.randn(shape), angles(shape[0], factor=factor)
    doubled = [torch.cat([table, table], -1)[None] for table in (cos, sin)]
    expected, _ = apply_rotary_pos_emb_interleave(as_batch(x), as_batch(x), *doubled)
    rotated = apply_rope(x, torch.cat([cos, sin], -1), interleaved=True)
    assert rotated.shape == x.shape
    torch.testing.assert_close(as_batch(deinterleave(rotated)), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize("shape", [(T, R), (T, H, R)])
def test_interleaved_is_deepseek_v2s(shape: tuple[int, ...], factor: float) -> None:
    """There pairs stay where they were, as here."""
    x, (cos, sin) = torch.randn(shape), angles(factor=factor)
    expected, _ = apply_rotary_emb(as_batch(x), as_batch(x), torch.complex(cos, sin)[None])
    torch.testing.assert_close(
        as_batch(apply_rope(x, torch.cat([cos, sin], -1), interleaved=True)), expected, atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize("shape", [(T, R), (T, H, R), (1, 1, R), (1, R)])
def test_halves_are_neoxs(shape: tuple[int, ...], factor: float) -> None:
    x, (cos, sin) = torch.randn(shape), angles(shape[0], factor=factor)
    doubled = [torch.cat([table, table], -1)[None] for table in (cos, sin)]
    expected, _ = apply_rotary_pos_emb(as_batch(x), as_batch(x), *doubled)
    rotated = apply_rope(x, torch.cat([cos, sin], -1), interleaved=False)
    torch.testing.assert_close(as_batch(rotated), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
def test_scores_depend_on_distance_only(interleaved: bool) -> None:
    """A rotary embedding makes q at position m and k at n see m - n alone."""
    frequencies = 10000.0 ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)
    positions = torch.tensor([[3, 1], [103, 101], [1002, 1000]], dtype=torch.float64)
    q, k = torch.randn(2, 1, R, dtype=torch.float64).expand(2, 3, R)
    theta = positions[..., None] * frequencies
    tables = torch.cat([theta.cos(), theta.sin()], -1)
    scores = (apply_rope(q, tables[:, 0], interleaved) * apply_rope(k, tables[:, 1], interleaved)).sum(-1)
    torch.testing.assert_close(scores, scores[:1].expand(3), atol=1e-10, rtol=0)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_are_rotated_in_float32_and_rounded_once(interleaved: bool, dtype: torch.dtype) -> None:
    x, (cos, sin) = torch.randn(T, H, R).to(dtype), angles()
    tables = torch.cat([cos, sin], -1)
    rotated = apply_rope(x, tables, interleaved)
    assert rotated.dtype == dtype
    assert torch.equal(rotated, apply_rope(x.float(), tables, interleaved).to(dtype))


@pytest.mark.parametrize("interleaved", [True, False])
def test_float64_stays_float64_and_the_input_stays_as_it_was(interleaved: bool) -> None:
    x, (cos, sin) = torch.randn(T, R, dtype=torch.float64), angles()
    kept = x.clone()
    rotated = apply_rope(x, torch.cat([cos, sin], -1), interleaved)
    assert rotated.dtype == torch.float64
    assert torch.equal(x, kept)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), atol=1e-6, rtol=1e-6)  # a rotation


@pytest.mark.parametrize("interleaved", [True, False])
def test_strided_rows(interleaved: bool) -> None:
    """The rope part is cut out of a wider projection."""
    wide, (cos, sin) = torch.randn(T, H, 5 + R), angles()
    tables = torch.cat([cos, sin], -1)
    part = wide[..., 5:]
    assert torch.equal(apply_rope(part, tables, interleaved), apply_rope(part.contiguous(), tables, interleaved))


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


def test_llama_4_factor_steps_at_multiples() -> None:
    factor = llama_4_factor(torch.tensor([0, 15, 16, 31, 32]), 0.5, 16)
    expected = [1, 1, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(3)]
    assert factor.tolist() == pytest.approx(expected, abs=1e-6)
