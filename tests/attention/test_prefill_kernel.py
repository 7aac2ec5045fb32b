"""The Triton kernels of prefill, also under a mask, against float64: in Triton's interpreter, some on a GPU, too."""

import pytest
import torch

from dcpmla.attention.backends import reference
from dcpmla.attention.backends.calls import PrefillCall, join_keys
from dcpmla.attention.backends.choice import PREFILL_BACKENDS, find_backend
from dcpmla.attention.mla import prefill as operators
from dcpmla.attention.triton import prefill as kernels
from dcpmla.attention.triton.merge import merge_part
from dcpmla.merge import merge_partials
from tests.support.backends import as_kernel
from tests.support.kernels import on_both, run_kernels
from tests.support.prefill_checks import SCALE, Case, check_prefill, draw_mask, segments

CASES: dict[str, Case] = {  # tails, single rows, requests without keys, dims that are no powers of 2
    "causal": ([37, 1, 130, 64], None, 2, (32, 16, 32)),
    "causal, several tiles": ([300], None, 1, (16, 16, 16)),
    "context": ([5, 70, 33], [64, 1, 137], 3, (32, 16, 32)),
    "requests without keys": ([3, 40, 2, 9], [0, 16, 0, 50], 2, (16, 16, 16)),
    "many requests": ([1, 2] * 10 + [140, 3], [3, 0] * 10 + [1, 260], 1, (16, 16, 16)),
    "dims of a tiny model": ([19, 33], None, 2, (16, 8, 24)),
    "odd dims": ([19, 33], [40, 7], 2, (48, 16, 32)),
    "DeepSeek-V3": ([17, 150], None, 1, (128, 64, 128)),
    "DeepSeek-V3, context": ([17, 5], [170, 20], 1, (128, 64, 128)),
    "DeepSeek-V3, requests without keys": ([30, 5, 9], [0, 140, 0], 2, (128, 64, 128)),
    "GLM-5": ([9, 70], None, 1, (192, 64, 256)),
    "without a rope part": ([9, 70], [33, 5], 2, (32, 0, 32)),
    "GLM-5-Next": ([9, 70], None, 1, (256, 0, 256)),
}
MASKED = "causal", "context", "requests without keys", "DeepSeek-V3, context", "GLM-5"


def check_unaligned(device: str) -> None:
    """Rows that no descriptor may point to."""
    mha_prefill = as_kernel(kernels.run, PrefillCall)

    generator = torch.Generator().manual_seed(0)
    q, k_nope, v = (torch.randn(9, 2, width, generator=generator).half().to(device) for width in (24, 19, 21))
    k_pe = torch.randn(9, 13, generator=generator).half().to(device)
    k_nope, k_pe, v = k_nope[..., 3:], k_pe[:, 5:], v[..., 1:]
    queries = segments([2, 7], device)
    out, lse = mha_prefill(q, k_nope, k_pe, v, *queries, *queries, SCALE, True)
    wanted = reference.mha_prefill(
        q.double(), join_keys(k_nope, k_pe).double(), v.double(), queries.start, queries.start, SCALE, True
    )
    torch.testing.assert_close(out.double(), wanted[0], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, wanted[1], atol=2e-4, rtol=1e-4)


def check_neighbours(device: str, backend: str = "triton", dims: tuple[int, int, int] = (16, 16, 16)) -> None:
    """Check that a request whose rows are NaN spoils no other's."""
    mha_prefill = as_kernel(find_backend(PREFILL_BACKENDS, backend).run, PrefillCall)
    nope, rope, v_head_dim = dims
    generator = torch.Generator().manual_seed(0)
    q, k_nope, v = (
        torch.randn(30, 2, width, generator=generator).half().to(device) for width in (nope + rope, nope, v_head_dim)
    )
    k_pe, lens = torch.randn(30, rope, generator=generator).half().to(device), segments([10, 10, 10], device)
    for causal in (True, False):
        wanted = mha_prefill(q, k_nope, k_pe, v, *lens, *lens, SCALE, causal)
        spoiled = [
            tensor.index_fill(0, torch.arange(10, 20, device=device), torch.nan) for tensor in (q, k_nope, k_pe, v)
        ]
        got = mha_prefill(*spoiled, *lens, *lens, SCALE, causal)
        for one, other in zip(got, wanted, strict=True):
            assert one[10:20].isnan().all()
            torch.testing.assert_close(one[:10], other[:10], atol=0, rtol=0)
            torch.testing.assert_close(one[20:], other[20:], atol=0, rtol=0)


def check_triton(_: str) -> None:
    for case in CASES.values():
        check_prefill(kernels.run, case, torch.float16, "cpu")
    for name in MASKED:
        check_prefill(kernels.run, CASES[name], torch.float16, "cpu", draw_mask)
    for tiling in kernels.TILINGS[1:]:  # half a word of keys, one, two
        kernels.TILINGS = (tiling,)
        check_prefill(kernels.run, CASES["causal"], torch.float16, "cpu", draw_mask)


def check_merge_part(device: str) -> None:
    """Like `merge_partials`: empty rows on either side, on both, with NaN in them; each output's dtype."""
    generator = torch.Generator().manual_seed(0)
    half, brain = torch.float16, torch.bfloat16
    cases = [((5, 3, 32), torch.float32, torch.float32), ((7, 1, 24), half, torch.float32), ((1, 8, 128), brain, brain)]
    if device == "cuda":
        cases += [((8192, 16, 128), brain, brain), ((30_001, 3, 24), half, torch.float32)]
    for (num_tokens, num_heads, width), part_dtype, dtype in cases:
        out, part = torch.randn(2, num_tokens, num_heads, width, generator=generator)
        lse, part_lse = 30 * torch.randn(2, num_tokens, num_heads, generator=generator)
        out, part = out.to(dtype), part.to(part_dtype)
        for rows, row_lse, index in ((out, lse, 0), (part, part_lse, 1), (out, lse, 2), (part, part_lse, 2)):
            if index < lse.numel():
                rows.flatten(0, 1)[index], row_lse.view(-1)[index] = torch.nan, -torch.inf
        wanted, wanted_lse = merge_partials(torch.stack([out.double(), part.double()]), torch.stack([lse, part_lse]))
        merged, merged_lse = merge_part(*(rows.to(device) for rows in (out, lse, part, part_lse)), dtype)
        assert merged.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(merged.double().cpu(), wanted, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(merged_lse.cpu(), wanted_lse, atol=1e-5, rtol=1e-6)


@on_both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators(device: str, dtype: torch.dtype) -> None:
    """Check schema, shapes and strides that tracing is told, what is written: `torch.library.opcheck`."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = segments([3, 1], device), segments([0, 5], device)
    q, kv, latents = (
        torch.randn(shape, generator=generator).to(device, dtype) for shape in ((4, 2, 24), (5, 2, 32), (5, 48))
    )
    # Keys and values, rope parts as they lie.
    for num_tokens, lens, causal, mask in (
        (4, queries, True, None),
        (5, keys, False, None),
        (4, queries, True, draw_mask(4, 3).to(device)),
    ):
        rows = (q, kv[:num_tokens, :, :16], latents[:num_tokens, 32:40], kv[:num_tokens, :, 16:])
        call = PrefillCall(*rows, *queries, *lens, SCALE, causal, mask)
        torch.library.opcheck(operators.mha_prefill.op, tuple(call))
    for width in (16, 17):
        out, part = torch.randn(2, 3, 2, width, generator=generator).to(device)
        lse, part_lse = torch.randn(2, 3, 2, generator=generator).to(device)
        torch.library.opcheck(operators.merge_part.op, (out, lse, part.to(dtype), part_lse, dtype))


def test_in_the_interpreter() -> None:
    run_kernels("cpu", check_triton)


@on_both
def test_odd_rows(device: str) -> None:
    run_kernels(device, check_unaligned, check_neighbours, check_merge_part)
