"""Cache formats byte by byte: codes compared with bit arithmetic and a search in float64, rows with handmade bytes."""

import re
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla import DCPConfig
from dcpmla.attention.mla.prefill import dequantize_rows, read_cache_rows
from dcpmla.cache.formats import (
    FP8,
    check_kv_scale,
    rope_dim_of,
    row_width,
    to_cache_rows,
    to_fp8,
    to_latents,
    write_latents,
)

FLT_MIN = 2.0**-126
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def value_of(code: int) -> float:
    """Return the value of an e4m3 byte: sign, 4 bits of exponent (bias 7), 3 of mantissa; all ones is NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if code & 128 else magnitude


TABLE = np.array([value_of(code) for code in range(256)])


def nearest_codes(x: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Search the nearest code in float64; of two equally near, the even one."""
    distance = np.abs(np.abs(x.astype(np.float64)).clip(max=448)[..., None] - TABLE[:127])
    is_odd = np.arange(127) % 2
    code = np.lexsort((np.broadcast_to(is_odd, distance.shape), distance))[..., 0]
    return (code + 128 * np.signbit(x)).astype(np.uint8)


def codes_of(x: Tensor) -> npt.NDArray[np.uint8]:
    return np.asarray(x.view(torch.uint8).numpy())


def numbers(num_rows: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Draw numbers of all magnitudes that a format rounds, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, width, generator=generator) * 2.0 ** torch.randint(
        -14, 9, (num_rows, width), generator=generator
    )
    return torch.where(torch.rand(num_rows, width, generator=generator) < 0.1, 0.0, x).to(dtype)


CASES = {"seed": st.integers(0, 1 << 30), "dtype": st.sampled_from([torch.bfloat16, torch.float16, torch.float32])}


def test_every_byte_decodes_to_its_value() -> None:
    """Every byte is tested under both formats, and times a scale in float64."""
    scale = torch.tensor([0.37])
    factor = scale.double().item()
    np.testing.assert_array_equal(to_latents(ALL_BYTES.view(FP8), 250, scale, torch.float64).numpy(), TABLE * factor)
    tail = struct.pack("<2f", factor, 2 * factor) + struct.pack("<2H", 0x3F80, 0xC000)  # 1 and -2 in bfloat16
    row = torch.cat([ALL_BYTES, torch.frombuffer(bytearray(tail), dtype=torch.uint8)])
    expected = np.concatenate([TABLE[:128] * factor, TABLE[128:] * 2 * factor, [1.0, -2.0]])
    np.testing.assert_array_equal(to_latents(row, 256, None, torch.float64).numpy(), expected)


def test_rounding_at_every_value_and_between() -> None:
    """Each value, each midpoint and both its float32 neighbours are tested: denormals, ties to even, saturation."""
    values = TABLE[:127].astype(np.float32)
    middles = (values[1:] + values[:-1]) / 2
    up, down = (np.nextafter(middles, np.float32(end)) for end in (np.inf, -np.inf))
    x = np.concatenate([values, middles, up, down, np.array([464.0, 465.0, 1e30, 1e-30], np.float32)])
    x = np.concatenate([x, -x])
    np.testing.assert_array_equal(codes_of(to_fp8(torch.from_numpy(x), torch.ones(1))), nearest_codes(x))
    assert codes_of(to_fp8(torch.tensor([2.0**-10, 3 * 2.0**-10]), torch.ones(1))).tolist() == [
        0,
        2,
    ]  # 0.5 and 1.5 times the smallest


@given(**CASES, scale=st.floats(2.0**-20, 2.0**20, width=32))
def test_fp8_rows(seed: int, dtype: torch.dtype, scale: float) -> None:
    """Codes are the nearest to value / scale; dequantized, off by 2^-4 or half the smallest step, or saturated."""
    kv_c, k_pe = numbers(3, 40, dtype, seed), numbers(3, 6, dtype, seed + 1)
    rows = to_cache_rows(kv_c, k_pe, FP8, torch.tensor([scale]))
    assert (rows.shape, rows.dtype) == ((3, row_width(FP8, 40, 6)), FP8)
    latents = torch.cat([kv_c, k_pe], -1)
    np.testing.assert_array_equal(codes_of(rows), nearest_codes(latents.float().numpy() / np.float32(scale)))
    held = latents.double().clamp(-448 * scale, 448 * scale)
    error = (to_latents(rows, 40, torch.tensor([scale]), torch.float64) - held).abs()
    bound = torch.maximum(held.abs() / 16, torch.tensor(scale * 2.0**-10, dtype=torch.float64))
    assert (error <= bound * (1 + 1e-6)).all()


@given(**CASES, magnitude=st.integers(-140, 100))
def test_fp8_ds_mla_rows(seed: int, dtype: torch.dtype, magnitude: int) -> None:
    """Each tile is scaled by its own largest value, down to float32 denormals; k_pe is in bfloat16."""
    kv_c, k_pe = numbers(3, 384, torch.float32, seed), numbers(3, 6, torch.bfloat16, seed + 1)
    kv_c[:, 128:256] *= 2.0**magnitude
    kv_c = kv_c.to(dtype).nan_to_num(posinf=1.0, neginf=-1.0)  # past float16
    rows = to_cache_rows(kv_c, k_pe, torch.uint8, None)
    tiles = kv_c.float().numpy().reshape(3, 3, 128)
    scales = np.maximum(np.abs(tiles).max(-1) / np.float32(448), np.float32(FLT_MIN))
    codes = nearest_codes(tiles / scales[..., None])
    k_pe_bits = (k_pe.float().numpy().view(np.uint32) >> 16).astype("<u2")
    expected = [
        codes[row].tobytes() + scales[row].astype("<f4").tobytes() + k_pe_bits[row].tobytes() for row in range(3)
    ]
    assert [row.numpy().tobytes() for row in rows] == expected
    decoded = to_latents(rows, 384, None, torch.float64)
    assert torch.equal(decoded[:, 384:], k_pe.double())
    peak = kv_c.double().unflatten(-1, (3, 128)).abs().amax(-1, keepdim=True).clamp(min=448 * FLT_MIN)
    bound = torch.maximum(kv_c.double().abs() / 16, (peak / 448 * 2.0**-10).expand(3, 3, 128).flatten(-2))
    assert ((decoded[:, :384] - kv_c.double()).abs() <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_with_scales_are_rounded_once_from_float32(dtype: torch.dtype) -> None:
    scale = torch.tensor([0.37])
    product = torch.from_numpy(TABLE.astype(np.float32) * np.float32(0.37))
    decoded = to_latents(ALL_BYTES.view(FP8), 250, scale, dtype)
    assert decoded.dtype == dtype
    torch.testing.assert_close(decoded, product.to(dtype), rtol=0, atol=0, equal_nan=True)
    rows = to_cache_rows(numbers(3, 384, torch.float32, 0), numbers(3, 6, torch.bfloat16, 1), torch.uint8, None)
    wide = to_latents(rows, 384, None, torch.float32)
    assert torch.equal(to_latents(rows, 384, None, dtype)[:, :384], wide[:, :384].to(dtype))


@pytest.mark.parametrize("storage", [FP8, torch.uint8])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["kv_c", "k_pe"])
def test_what_is_not_finite_is_refused_by_name(storage: torch.dtype, bad: float, name: str) -> None:
    latents = {"kv_c": torch.ones(2, 128), "k_pe": torch.ones(2, 6)}
    latents[name][1, 3] = bad
    kv_scale = torch.ones(1) if storage == FP8 else None
    with pytest.raises(
        ValueError, match=rf"^{name} has values that are not finite; an 8-bit cache \(--kv-cache-dtype\)"
    ):
        to_cache_rows(**latents, storage=storage, kv_scale=kv_scale)
    cache = torch.zeros(1, 2, row_width(storage, 128, 6), dtype=storage)
    write_latents(cache, **latents, slots=torch.tensor([1, -1]), kv_scale=kv_scale)  # another rank's row
    rows = dequantize_rows(read_cache_rows(cache, torch.tensor([1, 0])), 128, kv_scale, torch.float32)
    assert torch.equal(rows, torch.tensor([[1.0], [0.0]]).expand(2, 134))


def test_plain_rows_are_kept() -> None:
    kv_c, k_pe = torch.randn(3, 40), torch.randn(3, 6)
    kv_c[0, 0] = torch.nan
    rows = to_cache_rows(kv_c, k_pe, torch.float32, None)
    assert torch.equal(rows.view(torch.int32), torch.cat([kv_c, k_pe], -1).view(torch.int32))
    assert torch.equal(to_latents(rows[1:], 40, None, torch.float64), rows[1:].double())


@pytest.mark.parametrize(
    ("storage", "rank", "rope", "width"),
    [(torch.float16, 40, 6, 46), (FP8, 512, 64, 576), (torch.uint8, 128, 6, 144), (torch.uint8, 512, 64, 656)],
)
def test_widths(storage: torch.dtype, rank: int, rope: int, width: int) -> None:
    assert row_width(storage, rank, rope) == width
    assert rope_dim_of(width, storage, rank) == rope
    kv_scale = torch.ones(1) if storage == FP8 else None
    assert to_cache_rows(torch.ones(2, rank), torch.ones(2, rope), storage, kv_scale).shape == (2, width)


@pytest.mark.parametrize(
    ("storage", "kv_scale", "message"),
    [
        (FP8, None, "kv_scale is missing for a cache of torch.float8_e4m3fn"),
        (torch.uint8, torch.ones(1), "kv_scale is given for a cache of torch.uint8"),
        (torch.bfloat16, torch.ones(1), "kv_scale is given for a cache of torch.bfloat16"),
        (FP8, torch.ones(2), "kv_scale is torch.float32 (2,); expected torch.float32 of one element"),
        (FP8, torch.ones(1, dtype=torch.float64), "kv_scale is torch.float64 (1,); expected"),
    ],
)
def test_scales_that_do_not_belong(storage: torch.dtype, kv_scale: Tensor | None, message: str) -> None:
    for call in (
        lambda: check_kv_scale(storage, kv_scale),
        lambda: to_cache_rows(torch.ones(1, 128), torch.ones(1, 6), storage, kv_scale),
        lambda: to_latents(torch.ones(1, row_width(storage, 128, 6)).to(storage), 128, kv_scale, torch.float32),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kv_cache_dtype": "int8"},
            "kv_cache_dtype (--kv-cache-dtype) is 'int8'; it must be one of auto, bf16, fp8, fp8_ds_mla",
        ),
        (
            {"decode_query_dtype": "bf16"},
            "decode_query_dtype (--decode-query-dtype) is 'bf16'; it must be one of auto, fp8",
        ),
        *(
            (
                {"kv_cache_dtype": "fp8", "kv_cache_scale": scale},
                f"kv_cache_scale (--kv-cache-scale) is {scale}; it must be a normal float32",
            )
            for scale in (0.0, -1.0, float("inf"), float("nan"))
        ),
        (
            {"kv_cache_dtype": "fp8", "kv_cache_scale": 2.0, "calculate_kv_scales": True},
            "kv_cache_scale (--kv-cache-scale) is 2.0, but calc",
        ),
        (
            {"kv_cache_scale": 2.0},
            "kv_cache_scale (--kv-cache-scale) goes with kv_cache_dtype (--kv-cache-dtype) fp8, not with 'auto'",
        ),
        (
            {"kv_cache_dtype": "bf16", "calculate_kv_scales": True},
            "calculate_kv_scales (--calculate-kv-scales) goes with kv_cache_dtype",
        ),
        (
            {"kv_cache_dtype": "fp8_ds_mla", "decode_query_dtype": "fp8"},
            "decode_query_dtype (--decode-query-dtype) fp8 goes with kv_cache",
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        DCPConfig(**options)
