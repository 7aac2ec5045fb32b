"""Decode of pages of one row: rows of blocks that are apart; on a GPU the backend that takes them, and the conversion
of 8-bit caches bit by bit.

`test_decode_kernel` has the cases against float64.
"""

from typing import Any

import pytest
import torch

from dcpmla import mla_decode
from dcpmla.attention.backends.choice import DECODE_BACKENDS, select_backend
from dcpmla.attention.select.selector import selected_rows
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.cache import formats
from tests.support.backends import checked_call, decode, joined_call
from tests.support.decode_cases import FP8_QUERIES, QUANTIZED, Case


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [{}, *QUANTIZED])
def test_which_kernel_takes_pages_of_one_row(kind: dict[str, Any]) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("kernels for Hopper")
    case = Case([(1, 65)], block_size=1, **kind)
    inputs = case.inputs("cuda")
    chosen = select_backend(DECODE_BACKENDS, checked_call(**inputs))
    assert chosen.name == ("triton" if kind is FP8_QUERIES else "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 64])
@pytest.mark.parametrize("is_ds_mla", [False, True])
def test_codes_are_exact(dtype: torch.dtype, block_size: int, is_ds_mla: bool) -> None:
    """A query that sees one key gives its latent: each code, subnormal ones too, times its scale, rounded once."""
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
        joined_call(
            **{name: tensor if tensor is None else tensor.cuda() for name, tensor in on_device.items()},
            softmax_scale=1.0,
        )
    )
    assert torch.equal(out.cpu(), wanted)


def check_apart(device: str, dtype: torch.dtype) -> None:
    """Blocks with other layers' pages between them give what contiguous blocks give; rows have no rope part."""
    generator = torch.Generator().manual_seed(0)
    num_blocks, block_size, width = 5, 64, 512
    rows = torch.randn(num_blocks, block_size, width, generator=generator).to(device, dtype)
    memory = torch.full((num_blocks, block_size * width + 3 * 132 * 64), torch.nan, device=device, dtype=dtype)
    apart = memory[:, 136 : 136 + block_size * width].unflatten(1, (block_size, width)).copy_(rows)
    slots = torch.randint(0, num_blocks * block_size, (7, 40), generator=generator, dtype=torch.int32).to(device)
    selection = SelectedTokens(slots, slots, torch.arange(34, 41, dtype=torch.int32, device=device))
    q = torch.randn(7, 16, width, generator=generator).to(device, dtype)
    results = []
    for cache in (rows, apart):
        pages, step = selected_rows(cache, selection, None)
        results.append(decode(q, pages, step.block_table, step.local_seq_lens, 0.05, kv_lora_rank=width))
    for found, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, expected)
    whole = rows.flatten(0, 1).double()[slots.long()]
    expected = torch.stack(
        [
            ((q[token].double() @ keys[: 34 + token].T) * 0.05).softmax(-1) @ keys[: 34 + token]
            for token, keys in enumerate(whole)
        ]
    )
    torch.testing.assert_close(results[1][0].double(), expected, atol=2e-2, rtol=2e-2)


def test_blocks_apart() -> None:
    check_apart("cpu", torch.float32)


@pytest.mark.gpu
def test_blocks_apart_on_a_gpu() -> None:
    check_apart("cuda", torch.bfloat16)
