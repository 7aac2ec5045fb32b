"""Decode over views: slices of larger caches, queries whose parts lie apart, blocks that are apart, pages of one row;
the backend that takes them, and the conversion of 8-bit caches bit by bit.

`test_decode_kernel` has the cases against float64.
"""

from typing import Any

import pytest
import torch

from dcpmla.attention.backends import reference
from dcpmla.attention.backends.choice import DECODE_BACKENDS, find_backend, select_backend
from dcpmla.attention.select.selector import selected_rows
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.cache import formats
from tests.support.backends import checked_call, decode, in_parts
from tests.support.decode_cases import QUANTIZED, SHARED_FORMATS, Case, SharedCase, compare, long_case, ragged
from tests.support.kernels import on_both


@pytest.mark.gpu
def test_layers_of_one_cache_and_offsets_past_2_31() -> None:
    """A cache that is a slice of a larger one, its last block more than 2^31 elements after its first."""
    num_blocks, num_layers = 20000, 3
    layers = torch.full((num_blocks, num_layers, 64, 576), torch.nan, dtype=torch.bfloat16, device="cuda")
    assert layers.stride(0) * (num_blocks - 1) > 2**31
    table = torch.tensor([[num_blocks - 1, 0, 7]], dtype=torch.int32, device="cuda")
    keys = torch.randn(3, 64, 576, device="cuda").bfloat16()
    layers[table[0].long(), 1] = keys
    q, seq_lens = (
        torch.randn(1, 128, 576, device="cuda").bfloat16(),
        torch.tensor([150], dtype=torch.int32, device="cuda"),
    )
    out, lse = decode(q, layers[:, 1], table, seq_lens, 0.07)
    small = torch.arange(3, dtype=torch.int32, device="cuda")[None]
    wanted, wanted_lse = reference.mla_decode(checked_call(q.double(), keys.double(), small, seq_lens, 0.07, 512))
    compare((out, lse), (wanted, wanted_lse), Case([(1, 150)]), 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("part", [slice(0, 576), slice(4, 580), slice(8, 584)])
def test_queries_and_caches_that_are_views(part: slice) -> None:
    """Rows that TMA cannot address go to another kernel."""
    case = long_case(3, 3000)
    inputs = case.inputs("cuda")
    wide = {
        name: torch.full((*inputs[name].shape[:-1], 584), torch.nan, dtype=torch.bfloat16, device="cuda")
        for name in ("q", "kv_cache")
    }
    for name, tensor in wide.items():
        tensor[..., part] = inputs[name]
    out, lse = decode(**{**inputs, **{name: tensor[..., part] for name, tensor in wide.items()}})
    compare((out, lse), case.answer(inputs), case, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [128, 100, 16])
@pytest.mark.parametrize("most", [2048, 3])
def test_single_tokens_with_queries_head_by_head(num_heads: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are stored as a batched product over heads leaves them; many tokens take several launches."""
    monkeypatch.setattr("dcpmla.attention.hopper.decode.MAX_REQUESTS", most)
    num_tokens = 8
    rows = torch.randn(500, 1, 576, device="cuda").bfloat16()
    slots = torch.randint(0, 500, (num_tokens, 200), dtype=torch.int32, device="cuda")
    lens = torch.randint(0, 200, (num_tokens,), dtype=torch.int32, device="cuda")
    latent = torch.randn(num_heads, num_tokens, 512, device="cuda").bfloat16().transpose(0, 1)
    rope = torch.randn(num_tokens, num_heads, 64, device="cuda").bfloat16()
    got = decode((latent, rope), rows, slots, lens, 0.07)
    wanted = reference.mla_decode(
        checked_call(torch.cat([latent, rope], -1).double(), rows.double(), slots, lens, 0.07, 512)
    )
    compare(got, wanted, Case([(1, int(each)) for each in lens]), 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("kind", [{}, {"block_size": 1}, *QUANTIZED])
def test_queries_in_two_parts(backend: str, kind: dict[str, Any]) -> None:
    """The same bits as from joined ones."""
    inputs = long_case(5, 3000, **kind).inputs("cuda")
    chosen = find_backend(DECODE_BACKENDS, backend)
    if obstacle := chosen.obstacle(checked_call(**inputs)):
        pytest.skip(obstacle)
    parts = checked_call(**{**inputs, "q": in_parts(inputs["q"], 512)})
    assert not chosen.obstacle(parts)
    assert all(map(torch.equal, chosen.run(parts), chosen.run(checked_call(**inputs))))


PAGES_OF_ONE_ROW = [Case([(1, 65)], block_size=1, **kind) for kind in ({}, *QUANTIZED)]
PAGES_OF_ONE_ROW += [SharedCase(ragged(9, 1100), num_heads=64, format=format) for format in SHARED_FORMATS]


@pytest.mark.gpu
@pytest.mark.parametrize("case", PAGES_OF_ONE_ROW, ids=lambda case: f"{case.format}-{case.has_fp8_queries}-{case.rope}")
def test_which_kernel_takes_pages_of_one_row(case: Case) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("kernels for Hopper")
    chosen = select_backend(DECODE_BACKENDS, checked_call(**case.inputs("cuda")))
    assert chosen.name == ("triton" if case.has_fp8_queries else "hopper")


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
    moved = {name: tensor if tensor is None else tensor.cuda() for name, tensor in on_device.items()}
    out, _ = decode(**moved, softmax_scale=1.0)
    assert torch.equal(out.cpu(), wanted)


@on_both
def test_blocks_apart(device: str) -> None:
    """Blocks with other layers' pages between them give what contiguous blocks give; rows have no rope part."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
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
