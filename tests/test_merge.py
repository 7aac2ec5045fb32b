"""Merging compared with one softmax over all keys in float64: every way to cut the keys, every kind of empty part."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla import merge_partials
from dcpmla.merge import partial_weights, weigh_partial

GARBAGE = (0.0, math.nan, math.inf, -math.inf, 3e38)


def attend(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Compute out [T, H, D] and lse [T, H] from float64 scores [T, H, S] and values [S, H, D] by textbook softmax."""
    peak = scores.amax(-1, keepdim=True)
    weights = (scores - peak).exp()
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("ths,shd->thd", weights / total, values), (peak + total.log())[..., 0]


def cut(
    scores: Tensor, values: Tensor, parts: list[int], num_parts: int, garbage: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Assign each key to a part; return out [N, T, H, D] and float32 lse [N, T, H], garbage and -inf if empty."""
    out = torch.full((num_parts, *scores.shape[:2], values.shape[-1]), garbage, dtype=dtype)
    lse = torch.full(out.shape[:-1], -math.inf)
    for part in set(parts):
        keys = torch.tensor([key for key, home in enumerate(parts) if home == part])
        part_out, part_lse = attend(scores[..., keys], values[keys])
        out[part], lse[part] = part_out.to(dtype), part_lse.float()
    return out, lse


def problem(num_keys: int, seed: int, biases: Tensor | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(3, 2, num_keys, generator=generator, dtype=torch.float64)
    values = torch.randn(num_keys, 2, 5, generator=generator, dtype=torch.float64)
    return scores + (0 if biases is None else biases), values


def tolerance(lse: Tensor) -> float:
    """Return float32's resolution: an LSE is off by half an ulp, every weight by that factor (2^-11 at 1e4)."""
    return 2e-6 + 4 * float(lse[lse.isfinite()].abs().max()) * 2**-24


@given(
    num_parts=st.integers(1, 9),
    num_keys=st.integers(1, 20),
    seed=st.integers(0, 10**6),
    garbage=st.sampled_from(GARBAGE),
    data=st.data(),
)
def test_any_cut_of_the_keys(num_parts: int, num_keys: int, seed: int, garbage: float, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.integers(0, num_parts - 1), min_size=num_keys, max_size=num_keys))
    scores, values = problem(num_keys, seed)
    out, lse = merge_partials(*cut(scores, values, parts, num_parts, garbage, torch.float32))
    expected_out, expected_lse = attend(scores, values)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected_out, atol=2e-5, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-6)


@given(seed=st.integers(0, 10**6), data=st.data())
def test_parts_of_very_different_magnitude(seed: int, data: st.DataObject) -> None:
    parts = list(range(4)) + data.draw(st.lists(st.integers(0, 3), max_size=8))
    magnitudes = data.draw(
        st.lists(st.sampled_from([-1e4, -300.0, -80.0, 0.0, 80.0, 300.0, 1e4]), min_size=4, max_size=4)
    )
    scores, values = problem(len(parts), seed, torch.tensor([magnitudes[part] for part in parts], dtype=torch.float64))
    out, lse = merge_partials(*cut(scores, values, parts, 4, 0.0, torch.float32))
    expected_out, expected_lse = attend(scores, values)
    torch.testing.assert_close(out.double(), expected_out, atol=4 * tolerance(expected_lse), rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=2**-22)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_part_too_light_to_count_leaves_no_trace(garbage: float) -> None:
    """exp(-2e4) is zero in any float: weight zero gives zero whatever the payload holds."""
    out = torch.stack([torch.full((2, 3, 4), 1.5), torch.full((2, 3, 4), garbage)])
    lse = torch.stack([torch.full((2, 3), 1e4), torch.full((2, 3), -1e4)])
    merged, merged_lse = merge_partials(out, lse)
    assert torch.equal(merged, out[0])
    assert torch.equal(merged_lse, lse[0])


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_are_empty_everywhere(num_parts: int, garbage: float, dtype: torch.dtype) -> None:
    """Row 1 has no keys anywhere, row 0 in one part only."""
    out, lse = torch.full((num_parts, 2, 1, 3), garbage).to(dtype), torch.full((num_parts, 2, 1), -math.inf)
    out[-1, 0], lse[-1, 0] = 2.0, -5.0
    merged, merged_lse = merge_partials(out, lse)
    assert merged.dtype == dtype
    assert merged[:, 0].tolist() == [[2.0] * 3, [0.0] * 3]
    assert merged_lse[:, 0].tolist() == [-5.0, -math.inf]


def test_emptiness_is_per_row_and_head() -> None:
    """Every pattern of empty parts over the [T, H] grid merges right, with NaN in the empty rows."""
    patterns = torch.tensor(list(itertools.product([False, True], repeat=3))).T.reshape(3, 4, 2)
    lse = torch.tensor([0.25, -1.5, 2.0])[:, None, None].expand(3, 4, 2).masked_fill(patterns, -math.inf)
    payload = torch.tensor([1.0, -2.0, 4.0])[:, None, None].expand(3, 4, 2)
    merged, merged_lse = merge_partials(payload.masked_fill(patterns, math.nan)[..., None], lse)
    for token, head in itertools.product(range(4), range(2)):
        there = [part for part in range(3) if not patterns[part, token, head]]
        weights = [math.exp(lse[part, token, head]) for part in there]
        values = [float(payload[part, token, head]) for part in there]
        mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights) if there else 0.0
        assert merged[token, head, 0].item() == pytest.approx(mean, abs=1e-6)
        assert merged_lse[token, head].item() == pytest.approx(math.log(sum(weights)) if there else -math.inf, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_part_is_the_identity(dtype: torch.dtype) -> None:
    out, lse = (
        torch.randn(1, 3, 2, 4, dtype=torch.float64).to(dtype),
        torch.tensor([[[-1e4, 1e4], [0.3, -7.7], [88.0, -103.0]]]),
    )
    merged, merged_lse = merge_partials(out, lse)
    assert merged.dtype == dtype
    assert torch.equal(merged, out[0])
    assert merged_lse.dtype == torch.float32
    assert torch.equal(merged_lse, lse[0])


@pytest.mark.parametrize(("dtype", "half_ulp"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_narrow_rows_are_summed_in_float32_and_rounded_once(dtype: torch.dtype, half_ulp: float) -> None:
    """Summing 64 parts in the narrow dtype would lose several bits; one rounding loses half an ulp (2^-8, 2^-11)."""
    generator = np.random.default_rng(0)
    out = torch.tensor(generator.uniform(1, 2, (64, 5, 2, 8))).to(dtype)
    lse = torch.tensor(generator.uniform(-1, 1, (64, 5, 2)), dtype=torch.float32)
    weights = np.exp(lse.double().numpy())
    expected = (out.double().numpy() * weights[..., None]).sum(0) / weights.sum(0)[..., None]
    merged, _ = merge_partials(out, lse)
    assert merged.dtype == dtype
    np.testing.assert_allclose(merged.double().numpy(), expected, rtol=0, atol=1.01 * half_ulp)


def test_float64_stays_float64() -> None:
    scores, values = problem(7, 3)
    out, _ = cut(scores, values, [0, 0, 1, 1, 1, 2, 2], 3, math.nan, torch.float64)
    lse = torch.stack([attend(scores[..., keys], values[keys])[1] for keys in ([0, 1], [2, 3, 4], [5, 6])])
    merged, merged_lse = merge_partials(out, lse)
    expected, expected_lse = attend(scores, values)
    assert merged.dtype == torch.float64
    torch.testing.assert_close(merged, expected, atol=1e-13, rtol=0)
    torch.testing.assert_close(merged_lse, expected_lse, atol=1e-13, rtol=0)


def test_inputs_are_left_alone_and_may_be_views() -> None:
    out, lse = cut(*problem(9, 1), [0, 1, 3, 3, 1, 0, 0, 1, 3], 4, math.nan, torch.float32)
    expected = merge_partials(out, lse)
    strided_out, strided_lse = (
        out.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        lse.transpose(0, 2).contiguous().transpose(0, 2),
    )
    kept = strided_out.clone(), strided_lse.clone()
    for got, want in zip(merge_partials(strided_out, strided_lse), expected, strict=True):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close((strided_out, strided_lse), kept, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shares_of_the_parts_add_up(dtype: torch.dtype) -> None:
    scores, values = problem(8, 5)
    out, lse = cut(scores, values, [0, 0, 1, 3, 3, 1, 0, 3], 5, math.nan, dtype)
    expected, _ = attend(scores, values)
    shares = [weigh_partial(part, weight) for part, weight in zip(out, partial_weights(lse), strict=True)]
    assert all(share.dtype == torch.float32 for share in shares)
    assert not shares[2].any()
    assert not shares[4].any()
    torch.testing.assert_close(sum(shares).double(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


def test_a_share_keeps_float64_and_is_zero_where_all_is_empty() -> None:
    weights = partial_weights(torch.tensor([[-math.inf, 0.5], [-math.inf, -math.inf]]))
    assert weights.tolist() == [[0.0, 1.0], [0.0, 0.0]]
    share = weigh_partial(torch.tensor([[math.nan], [3.0]], dtype=torch.float64), weights[0])
    assert share.dtype == torch.float64
    assert share.tolist() == [[0.0], [3.0]]


@pytest.mark.parametrize(
    ("out_shape", "lse_shape"),
    [
        ((2, 3, 4, 5), (2, 3)),
        ((2, 3, 4, 5), (2, 3, 5)),
        ((2, 3, 4, 5), (3, 4)),
        ((3, 4, 5), (3, 4)),
        ((2, 3, 4, 5), (2, 3, 4, 1)),
    ],
)
def test_shapes_that_do_not_belong_together(out_shape: tuple[int, ...], lse_shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="^merge_partials: ") as error:
        merge_partials(torch.zeros(out_shape), torch.zeros(lse_shape))
    assert str(out_shape) in str(error.value)
    assert str(lse_shape) in str(error.value)
    assert "[N, T, H, D]" in str(error.value)
    assert "[N, T, H]" in str(error.value)


@pytest.mark.parametrize("magnitude", [0.0, 30.0, 1e3, 1e4, -1e4])
def test_shares_add_up_whatever_the_magnitude(magnitude: float) -> None:
    lse = magnitude + torch.randn(8, 5, 3, generator=torch.Generator().manual_seed(0))
    merged, _ = merge_partials(torch.ones(8, 5, 3, 4), lse)
    torch.testing.assert_close(merged, torch.ones(5, 3, 4), atol=1e-6, rtol=0)


def test_nan_of_a_part_with_keys_is_not_lost() -> None:
    """A part whose LSE is NaN is not empty: without it the merge would look right."""
    out, lse = torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3)
    lse[0, 0, 1], lse[1, 0, 2] = math.nan, -math.inf
    out[1, 0, 2] = math.nan
    merged, merged_lse = merge_partials(out, lse)
    assert merged.isnan().any(-1).tolist() == merged_lse.isnan().tolist() == [[False, True, False]]
