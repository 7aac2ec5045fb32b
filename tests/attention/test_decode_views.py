"""Decode kernels over views on a GPU: slices of larger caches, and queries whose parts lie apart."""

from typing import Any

import pytest
import torch

from dcpmla.attention.backends import reference
from dcpmla.attention.backends.choice import DECODE_BACKENDS, find_backend
from tests.support.backends import checked_call, decode, in_parts
from tests.support.decode_cases import QUANTIZED, Case, compare, long_case

pytestmark = pytest.mark.gpu


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
