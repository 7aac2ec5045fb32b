"""Matrices in 4 bits as checkpoints have them: all tensors of a matrix, by the ends of their names, and its values.

Written from the formats' descriptions, with nothing of the package.
"""

from collections.abc import Callable

import torch
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # outputs of a word, from the lowest bits up
Packed = tuple[Tensor, dict[str, Tensor]]


def quantize_fp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return e2m1 codes int8 [N, K / 2], the even column in the lower half, float32 powers of two [N, K / 32], and the
    values.

    Source: the reference code of DeepSeek-V4 (inference/convert.py, `cast_e2m1fn_to_e4m3fn`), which takes bytes apart.
    """
    scales = (weight.float().unflatten(1, (-1, 32)).abs().amax(-1).clamp(min=1e-9) / 6).log2().ceil().exp2()
    codes, values = _to_e2m1(weight, scales)
    return codes.view(torch.int8), scales, values


def _to_e2m1(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, uint8 [N, K / 2], and values of a weight by the scales [N, groups]."""
    scaled = weight.float().unflatten(1, (scales.shape[1], -1)) / scales[..., None]
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    values = (E2M1[codes].copysign(scaled) * scales[..., None]).flatten(1)
    codes = (codes + 8 * (scaled < 0)).flatten(1)
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8), values


def pack_words(codes: Tensor) -> Tensor:
    """Return codes from 0 to 15, int64 [N, K], eight to an int32 [N, K / 8], the first in the lowest bits."""
    packed = (codes.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def pack_int4(numbers: Tensor) -> Tensor:
    """Return integers from -8 to 7, int64 [N, K], packed as themselves + 8: int32 [N, K / 8]."""
    return pack_words(numbers + 8)


def pack_awq(codes: Tensor) -> Tensor:
    """Return codes from 0 to 15, int64 [K, N], in words of AWQ, int32 [K, N / 8]."""
    return pack_words(codes.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1))


def _integers(weight: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers from -8 to 7, int64 [N, K], scales [N, K / size] in dtype, and values."""
    groups = weight.float().unflatten(1, (-1, size))
    scales = (groups.abs().amax(-1).clamp(min=1e-9) / 7).to(dtype)
    numbers = (groups / scales.float()[..., None]).round().clamp(-8, 7)
    return numbers.flatten(1).long(), scales, (numbers * scales.float()[..., None]).flatten(1)


def _with_zeros(weight: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes from 0 to 15 [N, K], scales and zero points [N, K / size], and values."""
    groups = weight.float().unflatten(1, (-1, size))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low).clamp(min=1e-9) / 15).to(dtype)
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    values = ((codes - zeros[..., None]) * scales.float()[..., None]).flatten(1)
    return codes.flatten(1).long(), scales, zeros.long(), values


def _compressed(weight: Tensor, size: int) -> Packed:
    numbers, scales, values = _integers(weight, size, torch.bfloat16)
    parts = {"weight_packed": pack_int4(numbers), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    return values, parts


def _asymmetric(weight: Tensor, size: int) -> Packed:
    codes, scales, zeros, values = _with_zeros(weight, size, torch.bfloat16)
    parts = {"weight_packed": pack_words(codes), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    return values, parts | {"weight_zero_point": pack_words(zeros.T).T}


def _awq(weight: Tensor, size: int) -> Packed:
    codes, scales, zeros, values = _with_zeros(weight, size, torch.float16)
    return values, {"qweight": pack_awq(codes.T), "qzeros": pack_awq(zeros.T), "scales": scales.T}


def _gptq(weight: Tensor, size: int) -> Packed:
    numbers, scales, values = _integers(weight, size, torch.float16)
    zeros = pack_words(torch.full_like(scales.T, 7).long())  # less 1
    parts = {"qweight": pack_int4(numbers).T, "qzeros": zeros, "scales": scales.T}
    return values, parts | {"g_idx": torch.arange(weight.shape[1]).int() // size}


def _w4afp8(weight: Tensor, size: int) -> Packed:
    numbers, scales, values = _integers(weight, size, torch.bfloat16)
    codes = (numbers[:, ::2] & 15) + 16 * (numbers[:, 1::2] & 15)
    return values, {"weight": codes.to(torch.uint8).view(torch.int8), "weight_scale_inv": scales.float()}


def _mxfp4(weight: Tensor, _: int) -> Packed:
    codes, scales, values = quantize_fp4(weight)
    return values, {"weight_packed": codes.view(torch.uint8), "weight_scale": (scales.log2() + 127).to(torch.uint8)}


def _nvfp4(weight: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes, scales, the scale of all, 1 / divisor, and values."""
    whole = 1 / divisor
    groups = weight.float().unflatten(1, (-1, 16)).abs().amax(-1)
    scales = (groups / (6 * whole)).clamp(2.0**-9, 448).to(torch.float8_e4m3fn)
    codes, values = _to_e2m1(weight, scales.float() * whole)
    return codes, scales, whole, values


def _nvfp4_compressed(weight: Tensor, _: int) -> Packed:
    divisor = 6 * 448 / weight.float().abs().max()
    codes, scales, _, values = _nvfp4(weight, divisor)
    return values, {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": divisor.reshape(1)}


def _nvfp4_modelopt(weight: Tensor, _: int) -> Packed:
    codes, scales, whole, values = _nvfp4(weight, 6 * 448 / weight.float().abs().max())
    return values, {"weight": codes, "weight_scale": scales, "weight_scale_2": whole, "input_scale": torch.ones(())}


PACKERS: dict[str, Callable[[Tensor, int], Packed]] = {  # by the name of a scheme, of a matrix and a group's columns
    **dict.fromkeys(("int4", "int4_all", "int4_channel", "mixed", "w4a8"), _compressed),
    **{"int4_asymmetric": _asymmetric, "awq": _awq, "gptq": _gptq, "w4afp8": _w4afp8, "mxfp4": _mxfp4},
    **{"nvfp4": _nvfp4_modelopt, "nvfp4_ct": _nvfp4_compressed},
}
