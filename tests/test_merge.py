"""Merging compared with one softmax over all keys in float64: every way to cut the keys, every kind of empty part."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla import merge_partials
from dcpmla.merge import partial_weights, weigh_partial

GARBAGE = (0.0, math.nan, math.inf, -math.inf, 3e38)


RESOLUTION = {torch.float64: 2**-43, torch.float32: 2**-16, torch.float16: 2**-8, torch.bfloat16: 2**-5}
MAGNITUDES = st.just([0.0] * 9) | st.lists(
    st.sampled_from([-1e4, -300.0, -80.0, 0.0, 80.0, 300.0, 1e4]), min_size=9, max_size=9
)


def attend(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Compute out [T, H, D] and lse [T, H] from float64 scores [T, H, S], -inf of keys that are not seen, and values
    [S, H, D].
    """
    lse = scores.logsumexp(-1)
    return torch.einsum("ths,shd->thd", (scores - lse[..., None]).exp(), values), lse


def strided(tensor: Tensor) -> Tensor:
    """Return a view of the same shape over memory in another order."""
    order = tuple(reversed(range(tensor.ndim)))
    return tensor.permute(order).contiguous().permute(order)


@pytest.mark.parametrize("dtype", RESOLUTION)
@given(num_parts=st.integers(1, 9), num_keys=st.integers(1, 20), seed=st.integers(0, 10**6), magnitudes=MAGNITUDES)
def test_any_cut_of_the_keys(
    dtype: torch.dtype, num_parts: int, num_keys: int, seed: int, magnitudes: list[float]
) -> None:
    """Each row and head has its own cut, and keys in no part: it may be empty in some parts or in all, which then hold
    anything. Rows whose values are 1 stay 1, because the weights add up.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_keys, 2, 5, generator=generator, dtype=torch.float64)
    values[..., -1] = 1
    parts = torch.randint(-1, num_parts, (3, 2, num_keys), generator=generator)
    scores = 4 * torch.randn(parts.shape, generator=generator, dtype=torch.float64) + torch.tensor(magnitudes)[parts]
    scores = scores.masked_fill(parts < 0, -math.inf)
    cut = [attend(scores.masked_fill(parts != part, -math.inf), values) for part in range(num_parts)]
    outs, lse = map(torch.stack, zip(*cut, strict=True))
    is_empty, lse = lse == -math.inf, lse if dtype == torch.float64 else lse.float()
    expected, expected_lse = attend(scores, values)
    expected = expected.masked_fill(is_empty.all(0)[..., None], 0)
    largest, eps = max(lse[~is_empty].abs().tolist(), default=0.0), torch.finfo(lse.dtype).eps
    # A float's LSE is off by half an ulp, and each weight by that factor (2^-11 at 1e4).
    close = partial(torch.testing.assert_close, rtol=0, atol=RESOLUTION[dtype] + 4 * largest * eps)
    for garbage, is_view in itertools.product(GARBAGE, (False, True)):
        out = outs.masked_fill(is_empty[..., None], garbage).to(dtype)
        given_out, given_lse = (strided(out), strided(lse)) if is_view else (out, lse)
        merged, merged_lse = merge_partials(given_out, given_lse)
        assert (merged.dtype, merged_lse.dtype) == (dtype, lse.dtype)
        close(merged.double(), expected)
        close(merged[..., -1].double(), expected[..., -1], atol=1e-6)
        torch.testing.assert_close(merged_lse.double(), expected_lse, atol=84 * eps, rtol=2 * eps)
        assert not merged[is_empty.all(0)].any()
        if num_parts == 1:
            assert torch.equal(merged, out[0].masked_fill(is_empty[0][..., None], 0))
            assert torch.equal(merged_lse, lse[0])
        shares = [weigh_partial(part, weight) for part, weight in zip(out, partial_weights(given_lse), strict=True)]
        assert {share.dtype for share in shares} == {torch.promote_types(dtype, torch.float32)}
        assert not torch.stack(shares)[is_empty].any()
        close(sum(shares).double(), expected)
        torch.testing.assert_close((given_out, given_lse), (out, lse), atol=0, rtol=0, equal_nan=True)  # as they were


@pytest.mark.parametrize("garbage", GARBAGE)
def test_part_too_light_to_count_leaves_no_trace(garbage: float) -> None:
    """exp(-2e4) is zero in any float: weight zero gives zero whatever the payload holds."""
    out = torch.stack([torch.full((2, 3, 4), 1.5), torch.full((2, 3, 4), garbage)])
    lse = torch.stack([torch.full((2, 3), 1e4), torch.full((2, 3), -1e4)])
    merged, merged_lse = merge_partials(out, lse)
    assert torch.equal(merged, out[0])
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


def test_nan_of_a_part_with_keys_is_not_lost() -> None:
    """A part whose LSE is NaN is not empty: without it the merge would look right."""
    out, lse = torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3)
    lse[0, 0, 1], lse[1, 0, 2] = math.nan, -math.inf
    out[1, 0, 2] = math.nan
    merged, merged_lse = merge_partials(out, lse)
    assert merged.isnan().any(-1).tolist() == merged_lse.isnan().tolist() == [[False, True, False]]
