"""Decode over rows of shared keys (DeepSeek-V4): mistakes and codes. `test_decode_kernel` has the kernels."""

from typing import Any

import pytest
import torch

from dcpmla.cache.shared_format import rows_shape
from dcpmla.cache.shared_rows import read_rows
from tests.support.backends import decode
from tests.support.decode_cases import SharedCase, ones


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("kv_cache", lambda cache: cache[..., :-1], r"^kv_cache has shape .*; expected \[num_pages, 64, 201\] .* fp8"),
        ("kv_cache", lambda cache: cache.flatten(0, 1)[:, None], r"^kv_cache has shape .*; expected \[num_pages, 64"),
        ("kv_cache", lambda cache: torch.zeros(9, 1, 64), r"^kv_cache has shape .*; expected \[num_blocks, .*, 128\]"),
        ("kv_cache", lambda cache: torch.zeros(9, 1, 128).bfloat16(), "^kv_cache has dtype torch.bfloat16; expected"),
        ("kv_cache", lambda cache: torch.zeros(9, 1, 128).to(torch.float8_e4m3fn), "^q has dtype .* of shared keys"),
        ("q", lambda q: q.to(torch.float8_e4m3fn), "^q has dtype torch.float8_e4m3fn .* of shared keys"),
        ("kv_scale", lambda _: torch.ones(1), "^kv_scale is given for a cache of torch.uint8"),
    ],
)
def test_what_does_not_belong_together(name: str, change: Any, message: str) -> None:
    case = SharedCase(ones(5, 1), num_heads=2, format="fp8_ds_mla", kv_lora_rank=128, dtype=torch.float32)
    inputs = case.inputs("cpu")
    decode(**inputs)
    with pytest.raises(ValueError, match=message):
        decode(**{**inputs, name: change(inputs[name])})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_are_exact(dtype: torch.dtype) -> None:
    """A query that sees one row gives it: each code, subnormal ones too, times each scale that dtypes can hold."""
    codes = torch.tensor([code for code in range(256) if code not in (0x7F, 0xFF)], dtype=torch.uint8)  # without NaN
    cache = torch.zeros(rows_shape(64, 512, torch.uint8), dtype=torch.uint8)
    data, scales = cache.flatten(1)[0, : 64 * 576].view(64, 576), cache.flatten(1)[0, 64 * 576 : 64 * 584].view(64, 8)
    data[:, :448] = codes[torch.arange(64 * 448) % len(codes)].view(64, 448)
    data[:, 448:] = torch.randn(64, 64).bfloat16().view(torch.uint8)
    bounds = (20, 245) if dtype == torch.bfloat16 else (112, 133)
    scales[:, :7] = torch.linspace(*bounds, 448).round().to(torch.uint8).view(64, 7)
    numbers = torch.arange(64, dtype=torch.int32)
    wanted = read_rows(cache, numbers.long(), 512, dtype)[:, None].expand(64, 16, 512)
    assert wanted.isfinite().all()
    tensors = torch.zeros(64, 16, 512, dtype=dtype), cache, numbers[:, None], torch.ones(64, dtype=torch.int32)
    for backend in ("hopper", "triton") if torch.cuda.get_device_capability()[0] == 9 else ("triton",):
        out, _ = decode(*(tensor.cuda() for tensor in tensors), softmax_scale=1.0, backend=backend)
        assert torch.equal(out.cpu(), wanted)
