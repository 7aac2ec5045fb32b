"""The format of rows of shared keys (DeepSeek-V4), byte for byte."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dcpmla.cache.shared_format import rows_shape
from dcpmla.cache.shared_rows import read_rows, write_rows
from tests.attention.test_output_formats import e4m3

POISON = 0xA5
POSITIVE = np.array([code * 2.0**-9 for code in range(8)] + [(8 + c % 8) * 2.0 ** (c // 8 - 10) for c in range(8, 127)])


def rows_of_all_sizes(head_dim: int) -> Tensor:
    """Draw rows from 1e-30 to 1e30, one row of zeros, and maxima at and next to the edges of scales."""
    generator = torch.Generator().manual_seed(head_dim)
    rows = torch.randn(40, head_dim, generator=generator) * 10.0 ** torch.arange(-30, 30, 1.5)[:, None]
    rows[3] = 0
    rows[20, ::64] = 448 * 2.0**-3
    rows[21, 5::64] = -448 * 2.0**4 * (1 + 2**-7)
    rows[22] = torch.linspace(-1, 1, head_dim)
    return rows


def to_bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Round float32 to bfloat16, ties to even; return the bits."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def encode(row: np.ndarray[Any, Any]) -> tuple[bytes, bytes]:
    """Encode a row as its data and its scales, from the words that describe the format."""
    halves = to_bfloat16(row)
    exact = (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    data, scales = b"", b""
    for tile in exact[:-64].reshape(-1, 64):
        exponent = -150
        while max(np.abs(tile).max(), 1e-4) > 448 * 2.0**exponent:
            exponent += 1
        data += e4m3(tile / 2.0**exponent).tobytes()
        scales += bytes([exponent + 127])
    return data + halves[-64:].tobytes(), scales.ljust(8, b"\0")


@pytest.mark.parametrize("head_dim", [512, 128])
def test_bytes(head_dim: int) -> None:
    """Rows go where they should, byte for byte, nothing else changes, and reading returns the bytes' values."""
    rows, data_bytes = rows_of_all_sizes(head_dim), head_dim + 64
    shape = rows_shape(130, head_dim, torch.uint8)
    assert (shape[0], shape[1] * shape[2] % data_bytes) == (3, 0)
    if head_dim == 512:
        assert shape == (3, 64, 585)
    cache = torch.full(shape, POISON, dtype=torch.uint8)
    expected = cache.numpy().copy().reshape(3, -1)
    slots = torch.tensor(random.Random(0).sample(range(3 * 64), len(rows)))
    slots[::7] = -1
    write_rows(cache, rows, slots)
    values = []
    for row, slot in zip(rows.numpy(), slots.tolist(), strict=True):
        data, scales = encode(row)
        if slot >= 0:
            page, number = divmod(slot, 64)
            expected[page, number * data_bytes :][:data_bytes] = np.frombuffer(data, np.uint8)
            expected[page, 64 * data_bytes + 8 * number :][:8] = np.frombuffer(scales, np.uint8)
            codes = np.frombuffer(data[: head_dim - 64], np.uint8)
            tiles = (POSITIVE[codes & 127] * np.where(codes & 128, -1, 1)).reshape(-1, 64)
            tiles = tiles * 2.0 ** (np.frombuffer(scales, np.uint8)[: len(tiles), None].astype(float) - 127)
            rope = (np.frombuffer(data[head_dim - 64 :], np.uint16).astype(np.uint32) << 16).view(np.float32)
            values.append(np.concatenate([tiles.flatten(), rope]))
    assert cache.numpy().tobytes() == expected.tobytes()
    found = read_rows(cache, slots[slots >= 0], head_dim, torch.float64)
    assert torch.equal(found, torch.from_numpy(np.stack(values)))
    held = rows[slots >= 0].double()
    assert ((found - held).abs().amax(1) <= held.abs().amax(1) / 14 + 1e-4).all()


@pytest.mark.parametrize("head_dim", [64, 100, 640])
def test_widths_without_a_format(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"fp8_ds_mla takes rows of 64 rotated values .* head_dim is {head_dim}$"):
        rows_shape(1, head_dim, torch.uint8)
