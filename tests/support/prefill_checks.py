"""Backends of prefill against float64: cases, masks, and rows among NaN."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dcpmla.attention.backends import reference
from dcpmla.attention.backends.calls import PrefillCall, Segments, join_keys

SCALE = 0.17
# query_lens, key_lens (None: causal), heads, (P, R, V).
Case = tuple[list[int], list[int] | None, int, tuple[int, int, int]]


def segments(lens: Sequence[int], device: str) -> Segments:
    start = tuple(sum(lens[:count]) for count in range(len(lens) + 1))
    return Segments(start, torch.tensor(start, dtype=torch.int32, device=device))


def poisoned(rows: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """Return the same rows in a view with NaN on all sides."""
    shape = rows.shape[0] + 200, *rows.shape[1:-1], rows.shape[-1] + 16
    whole = torch.full(shape, torch.nan, dtype=dtype, device=device)
    view = whole[8 : 8 + rows.shape[0], ..., 8 : 8 + rows.shape[-1]]
    return view.copy_(rows)


def check_prefill(
    prefill: Callable[[PrefillCall], tuple[Tensor, Tensor]],
    case: Case,
    dtype: torch.dtype,
    device: str,
    draw_mask: Callable[[int, int], Tensor] | None = None,
    window: int | None = None,
) -> None:
    """Compare a backend's (out, lse) with float64, among rows of NaN.

    Args:
        draw_mask: A function of the numbers of tokens and keys that returns a mask; parts of its rows are empty, but
            with a window.
        window: Keys up to each token's that the mask has at most.
    """
    query_lens, key_lens, num_heads, (nope, rope, v_head_dim) = case
    queries, keys = segments(query_lens, device), segments(query_lens if key_lens is None else key_lens, device)
    generator = torch.Generator().manual_seed(0)
    num_tokens, num_keys = queries.start[-1], keys.start[-1]
    shapes = [(num_tokens, num_heads, nope + rope), (num_keys, num_heads, nope), (num_keys, rope)]
    shapes.append((num_keys, num_heads, v_head_dim))
    q, k_nope, k_pe, v = (poisoned(torch.randn(shape, generator=generator), dtype, device) for shape in shapes)
    mask = None if draw_mask is None else draw_mask(num_tokens, max(keys.lens))
    causal, device_mask = key_lens is None, None if mask is None else mask.to(device)
    out, lse = prefill(PrefillCall(q, k_nope, k_pe, v, *queries, *keys, SCALE, causal, device_mask, window=window))
    wide = (rows.double().cpu() for rows in (q, join_keys(k_nope, k_pe), v))
    expected, expected_lse = reference.mha_prefill(*wide, queries.start, keys.start, SCALE, causal, mask)
    assert mask is None or window or 0 < (expected_lse == -torch.inf).sum() < expected_lse.numel()
    assert (out.dtype, lse.dtype, out.shape, lse.shape) == (dtype, torch.float32, expected.shape, expected_lse.shape)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out.double().cpu(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.cpu(), expected_lse, atol=2e-4, rtol=1e-4)


def draw_mask(num_tokens: int, num_keys: int) -> Tensor:
    """Return rows of all bits, none, one, few, and of few among the last or the first keys: tiles before or after them
    are empty.
    """
    bits = torch.rand(num_tokens, num_keys, generator=torch.Generator().manual_seed(2)) < 0.1
    bits[1::7], bits[2::7], bits[3::7] = True, False, False
    bits[3::7, num_keys // 2] = True
    bits[4::7, : num_keys - num_keys // 4] = False
    bits[5::7, num_keys // 4 :] = False
    padded = torch.nn.functional.pad(bits, (0, -num_keys % 32)).unflatten(1, (-1, 32))
    return (padded.long() << torch.arange(32)).sum(-1).to(torch.int32)
