"""Decode on a GPU: the backend that takes pages of one row, and the conversion of 8-bit caches bit by bit.

`test_decode_kernel` has the cases against float64.
"""

from typing import Any

import pytest
import torch

from dcpmla.attention import backends
from dcpmla.cache import formats
from tests.support.backends import checked_call
from tests.support.decode_cases import FP8_QUERIES, QUANTIZED, Case


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [{}, *QUANTIZED])
def test_which_kernel_takes_pages_of_one_row(kind: dict[str, Any]) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("kernels for Hopper")
    case = Case([(1, 65)], block_size=1, **kind)
    inputs = case.inputs("cuda")
    chosen = backends.select_backend(backends.DECODE_BACKENDS, checked_call(**inputs))
    assert chosen.name == ("triton" if kind is FP8_QUERIES else "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 64])
@pytest.mark.parametrize("is_ds_mla", [False, True])
def test_codes_are_exact(dtype: torch.dtype, block_size: int, is_ds_mla: bool) -> None:
    """A query that sees one key gives its latent: each code, subnormal ones too, times its scale, rounded once."""
    from dcpmla import mla_decode

    codes = torch.tensor([code for code in range(256) if code not in (0x7F, 0xFF)], dtype=torch.uint8)  # without NaN
    rows = codes[torch.arange(40 * 512) % len(codes)].view(40, 512)
    kv_scale = None if is_ds_mla else torch.tensor([0.7])
    if is_ds_mla:
        powers = torch.linspace(*((-5, 1.9) if dtype == torch.float16 else (-34, 35.8)), 160, dtype=torch.float64)
        rows = torch.cat(
            [rows, (10**powers).float().view(40, 4).view(torch.uint8)], -1
        )  # 10 ** 35.88 is the largest scale of `encode`
    rows = torch.nn.functional.pad(rows, (0, 128 if is_ds_mla else 64)).view(torch.uint8 if is_ds_mla else formats.FP8)
    wanted = formats.to_latents(rows, 512, kv_scale, dtype)[:, None, :512].expand(40, 16, 512)
    cache = torch.zeros(40, block_size, rows.shape[-1], dtype=torch.uint8).view(rows.dtype)
    cache[:, 0] = rows
    on_device = {
        "q": torch.zeros(40, 16, 576, dtype=dtype),
        "kv_cache": cache,
        "block_table": torch.arange(40, dtype=torch.int32)[:, None],
        "seq_lens": torch.ones(40, dtype=torch.int32),
        "kv_scale": kv_scale,
    }
    out, _ = mla_decode(
        **{name: tensor if tensor is None else tensor.cuda() for name, tensor in on_device.items()}, scale=1.0
    )
    assert torch.equal(out.cpu(), wanted)
