"""Kernels of attention over weights in block fp8, and over their values: on a GPU, else in Triton's interpreter."""

import torch
from torch import Tensor

from dcpmla.attention.output import kernels as output_kernels
from dcpmla.attention.output.formats import OutputQuant, TargetRows
from dcpmla.attention.projection_calls import QueryAbsorption, ValueProjection
from dcpmla.attention.triton import projections as kernels
from dcpmla.parallel.formats import Quantized, dequantize
from tests.parallel.test_fp8_linear import blocks
from tests.support.kernels import on_both, run_kernels

DIFFERENT = 1e-3  # of a kernel's numbers, at most; on an H200 they were 4e-5


def check_kernels(device: str) -> None:
    """Compare codes with scales and their values: to the bit in the interpreter; GPUs sum in another order."""
    if device == "cpu":
        check_size(device, torch.float16, 3, 1, 256)
    for num_tokens in (1, 17, 70, 300) if device == "cuda" else ():
        check_size(device, torch.bfloat16, num_tokens, 16, 512)


def check_size(device: str, dtype: torch.dtype, num_tokens: int, heads: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(3)
    made = [blocks(256, rank, seed) for seed in range(heads)]
    both = Quantized(*(torch.stack(parts).to(device) for parts in zip(*(each[:2] for each in made), strict=True)))
    q = torch.randn(num_tokens, heads, 192, generator=generator).to(device, dtype)
    out = torch.randn(num_tokens, heads, rank, generator=generator).to(device, dtype)
    values = dequantize(both, dtype)
    w_uk, w_uv = (
        Quantized(both.codes[:, part], both.scales[:, at])
        for part, at in ((slice(128), slice(1)), (slice(128, 256), slice(1, 2)))
    )
    absorbed = kernels.absorb_query(QueryAbsorption(q, w_uk.codes, None, False, None, w_uk.scales))
    assert_same(absorbed, kernels.absorb_query(QueryAbsorption(q, values[:, :128], None, False, None)))
    for quant in (OutputQuant("fp8_groups"), OutputQuant("fp8", scale=torch.ones(1, device=device)), None):
        results = []
        for weight, scales in ((w_uv.codes, w_uv.scales), (values[:, 128:], None)):
            rows = torch.empty(num_tokens, heads * 128, dtype=dtype, device=device), None
            rows = rows if quant is None else quant.empty(num_tokens, heads * 128, torch.device(device))
            into = None if quant is None or quant.format == "fp8" else rows[1]
            target = TargetRows(0, rows[0], into, quant and quant.scale)
            output_kernels.project_rows(ValueProjection(out, weight, scales), target)
            results.append(rows)
        assert_same(results[0][0], results[1][0])
        if quant is not None:
            assert_same(results[0][1], results[1][1])


def assert_same(got: Tensor, wanted: Tensor) -> None:
    """Compare numbers: on a GPU a few may be rounded another way."""
    if got.is_cuda:
        got, wanted = got.double(), wanted.double()
        assert (got != wanted).sum() <= DIFFERENT * got.numel() + 1
        torch.testing.assert_close(got, wanted, rtol=2**-3, atol=wanted.abs().max().item() * 2**-8)
    else:
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


@on_both
def test_kernels(device: str) -> None:
    run_kernels(device, check_kernels)
