"""Weights in 4 bits: their values, and the same values in e4m3."""

import pytest
import torch

from dcpmla.parallel.formats import Quantized, dequantize
from dcpmla.parallel.reformat import to_block_fp8


def random_fp4(num_rows: int, num_cols: int, lowest: int, highest: int, *batch: int) -> Quantized:
    """Every code, zeros of both signs included, and exponents of a range."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (*batch, num_rows, num_cols // 2), generator=generator)
    scales = torch.randint(lowest, highest + 1, (*batch, num_rows, num_cols // 32), generator=generator)
    return Quantized(codes.to(torch.uint8), scales.to(torch.uint8))


def test_values_of_e2m1() -> None:
    """Sign, two bits of exponent with bias 1, one of mantissa; the even column first."""
    weight = random_fp4(5, 64, 0, 254)
    values = dequantize(weight, torch.float64)
    for row in range(5):
        for col in range(64):
            code = int(weight.codes[row, col // 2]) >> (4 * (col % 2)) & 15
            exponent, mantissa = code >> 1 & 3, code & 1
            size = (1 + mantissa / 2) * 2 ** (exponent - 1) if exponent else mantissa / 2
            expected = (-1) ** (code >> 3) * size * 2.0 ** (int(weight.scales[row, col // 32]) - 127)
            assert float(values[row, col]) == expected


@pytest.mark.parametrize(
    ("shape", "lowest", "highest"), [((200, 288), 113, 127), ((3, 128, 128), 0, 7), ((1, 32), 254, 254)]
)
def test_reencoding_is_exact(shape: tuple[int, ...], lowest: int, highest: int) -> None:
    """Groups of a block differ by 2^14 at most; the last block of rows and of columns is ragged."""
    weight = random_fp4(*shape[-2:], lowest, highest, *shape[:-2])
    block = to_block_fp8(weight)
    assert block is not None
    assert torch.equal(dequantize(block, torch.float32), dequantize(weight, torch.float32))
    assert (torch.frexp(block.scales)[0] == 0.5).all()
    assert block.scales.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))


def one_group(rows: slice, exponent: int, code: int) -> Quantized:
    """Return a block whose first group of some rows has another exponent and one code."""
    weight = random_fp4(128, 128, 127, 127)
    codes, scales = weight.codes.clone(), weight.scales.clone()
    codes[rows, :16], scales[rows, 0] = code, exponent
    return Quantized(codes, scales)


@pytest.mark.parametrize(
    ("exponent", "code", "is_exact"),
    [
        (127 - 14, 0x11, True),
        (127 - 15, 0x11, False),  # 0.5 x 2^-15
        (127 - 15, 0x22, True),  # 1 x 2^-15 is as large as 0.5 x 2^-14
        (0, 0x80, True),  # zeros have any scale
        (254, 0x00, True),
    ],
)
def test_what_e4m3_has_no_code_for(exponent: int, code: int, is_exact: bool) -> None:
    weight = one_group(slice(5, 6), exponent, code)
    block = to_block_fp8(weight)
    assert (block is not None) == is_exact
    if block is not None:
        assert torch.equal(dequantize(block, torch.float32), dequantize(weight, torch.float32))
