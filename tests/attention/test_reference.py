"""The plain-torch attention, which every kernel is held against, against softmax attention written out in float64,
token by token.
"""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla.attention.backends import reference
from tests.support.backends import checked_call, decode, in_parts

L, R, P, V = 6, 4, 5, 3  # latent, rope part, key and value of a head
SCALE = 0.37


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, float]:
    """Attend from one query [d] to keys [S, d] and values [S, v] in float64; (0, -inf) without keys."""
    if len(keys) == 0:
        return torch.zeros(values.shape[-1], dtype=torch.float64), -math.inf
    scores = [scale * float(query.double() @ key.double()) for key in keys]
    peak = max(scores)
    weights = [math.exp(score - peak) for score in scores]
    out = sum(weight * value.double() for weight, value in zip(weights, values, strict=True)) / sum(weights)
    assert isinstance(out, Tensor)
    return out, peak + math.log(sum(weights))


def attend_heads(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """query [h, d], keys [S, h, d], values [S, h, v] -> out [h, v], lse [h]."""
    rows = [attend(query[head], keys[:, head], values[:, head], scale) for head in range(len(query))]
    return torch.stack([out for out, _ in rows]), torch.tensor([lse for _, lse in rows], dtype=torch.float64)


def check_close(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], atol: float = 1e-5) -> None:
    assert got[1].dtype == torch.float32
    torch.testing.assert_close(got[0].double(), wanted[0], atol=atol, rtol=0)
    torch.testing.assert_close(got[1].double(), wanted[1], atol=1e-5, rtol=1e-6)


class PagedCache:
    """A cache of garbage with sequences written into random blocks, and with a block of garbage alone.

    Attributes:
        block_table: Its padding points nowhere, or to the block of garbage (`pads_with_block`).
    """

    def __init__(
        self,
        lens: Sequence[int],
        block_size: int,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        garbage: float = math.nan,
        pads_with_block: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sequences = [
            torch.randn(length, L + R, generator=generator, dtype=torch.float64).to(dtype) for length in lens
        ]
        counts = [len(range(0, length, block_size)) for length in lens]
        ids = random.Random(seed).sample(range(1, sum(counts) + 3), sum(counts))
        self.kv_cache = torch.full((len(ids) + 3, block_size, L + R), garbage, dtype=dtype)
        nowhere = 0 if pads_with_block else 2**31 - 1
        self.block_table = torch.full((len(lens), max(counts, default=0) + 1), nowhere, dtype=torch.int32)
        self.seq_lens = torch.tensor(lens, dtype=torch.int32)
        for sequence, row, count in zip(self.sequences, self.block_table, counts, strict=True):
            blocks = [ids.pop() for _ in range(count)]
            row[:count] = torch.tensor(blocks, dtype=torch.int32)
            for position, latent in enumerate(sequence):
                self.kv_cache[blocks[position // block_size], position % block_size] = latent


def naive_decode(q: Tensor, sequences: Sequence[Tensor], scale: float, kv_lora_rank: int = L) -> tuple[Tensor, Tensor]:
    """Every head of a request's query over the same latents."""
    num_heads = q.shape[1]
    rows = [
        attend_heads(
            query, kv[:, None].expand(-1, num_heads, -1), kv[:, None, :kv_lora_rank].expand(-1, num_heads, -1), scale
        )
        for query, kv in zip(q, sequences, strict=True)
    ]
    return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])


@given(
    requests=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 20)), min_size=1, max_size=5),
    sizes=st.tuples(st.integers(1, 3), st.sampled_from([1, 3, 8])),
    garbage=st.tuples(st.sampled_from([math.nan, math.inf, -math.inf, 1e30]), st.booleans()),
    is_uniform=st.booleans(),
    padding=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
def test_decode(
    requests: list[tuple[int, int]],
    sizes: tuple[int, int],
    garbage: tuple[float, bool],
    is_uniform: bool,
    padding: int,
    seed: int,
) -> None:
    """Ragged lengths, some empty. Query tokens of a request share its blocks; each sees the first tokens of the cache,
    up to its own bound; padding sees none.
    """
    draw, (num_heads, block_size) = random.Random(seed), sizes
    query_lens = [requests[0][0] if is_uniform else query for query, _ in requests]
    lens = [length for _, length in requests]
    cache = PagedCache(lens, block_size, seed=seed, garbage=garbage[0], pads_with_block=garbage[1])
    bounds = [
        sorted(draw.randint(length if query == 1 else 0, length) for _ in range(query))
        for query, length in zip(query_lens, lens, strict=True)
    ]
    sequences = [cache.sequences[request][:bound] for request, seen in enumerate(bounds) for bound in seen]
    seq_lens = torch.tensor([bound for seen in bounds for bound in seen], dtype=torch.int32)
    q = torch.randn(len(sequences), num_heads, L + R, generator=torch.Generator().manual_seed(seed))
    wanted = naive_decode(q, sequences, SCALE)
    rows = cache.kv_cache, cache.block_table
    if is_uniform:
        got = decode(q, *rows, seq_lens, SCALE, L, max_query_len=query_lens[0])
        assert got[0].shape == (len(q), num_heads, L)
        check_close(got, wanted)
        parts = decode(in_parts(q, L), *rows, seq_lens, SCALE, L, max_query_len=query_lens[0])
        assert all(map(torch.equal, parts, got))
    start_loc = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    padded_q = torch.cat([q, q[:1].expand(padding, -1, -1)])
    padded_lens = torch.cat([seq_lens, seq_lens.new_zeros(padding)])
    ragged = {"query_start_loc": start_loc, "max_query_len": max(query_lens)}
    out, lse = decode(padded_q, *rows, padded_lens, SCALE, L, **ragged)
    check_close((out[: len(q)], lse[: len(q)]), wanted)
    assert not out[len(q) :].any()
    assert (lse[len(q) :] == -math.inf).all()


@pytest.mark.parametrize("magnitude", [1e-4, 1e3])
def test_decode_with_scores_far_from_one(magnitude: float) -> None:
    """Scores of thousands overflow an exp that does not subtract the maximum."""
    cache = PagedCache([7, 12], 4, dtype=torch.float64)
    q = magnitude * torch.randn(2, 2, L + R, dtype=torch.float64)
    out, lse = decode(q, cache.kv_cache, cache.block_table, cache.seq_lens, SCALE, L)
    assert out.dtype == torch.float64
    assert lse.dtype == torch.float32
    wanted, wanted_lse = naive_decode(q, cache.sequences, SCALE)
    torch.testing.assert_close(out, wanted, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-6, rtol=2**-23)


def test_decode_in_bfloat16_computes_in_float32() -> None:
    """Inputs are exact in bfloat16: what is left is one rounding of the output."""
    cache = PagedCache([30, 3], 4, dtype=torch.bfloat16)
    q = torch.randn(2, 2, L + R).bfloat16()
    out, lse = decode(q, cache.kv_cache, cache.block_table, cache.seq_lens, SCALE, L)
    assert out.dtype == torch.bfloat16
    wanted, wanted_lse = naive_decode(q, cache.sequences, SCALE)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=2**-8)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=0)


def test_decode_of_strided_views() -> None:
    """A layer's slice of a cache that holds all layers, the first columns of a wider table, heads cut out of a wider
    query.
    """
    cache = PagedCache([6, 11], 4)
    layers = torch.stack([torch.full_like(cache.kv_cache, math.nan), cache.kv_cache], 1)
    table = torch.cat([cache.block_table, torch.full_like(cache.block_table, 10**6)], -1)[
        :, : cache.block_table.shape[1]
    ]
    q = torch.randn(2, 5, L + R + 2)[:, 1:4, 1:-1]
    check_close(
        decode(q, layers[:, 1], table, cache.seq_lens, SCALE, L),
        naive_decode(q, cache.sequences, SCALE),
    )


@pytest.mark.parametrize("max_gathered", [1, 100, 1000])
def test_decode_in_tiles_is_the_same(monkeypatch: pytest.MonkeyPatch, max_gathered: int) -> None:
    cache = PagedCache([6, 0, 11, 3, 9], 4)
    q = torch.randn(5, 2, L + R)
    calls, tile = [], reference._decode_tile
    monkeypatch.setattr(reference, "_decode_tile", lambda *args: (calls.append(args), tile(*args))[1])
    monkeypatch.setattr(reference, "_MAX_GATHERED", max_gathered)
    check_close(
        decode(q, cache.kv_cache, cache.block_table, cache.seq_lens, SCALE, L),
        naive_decode(q, cache.sequences, SCALE),
    )
    assert len(calls) == {1: 5, 100: 5, 1000: 1}[max_gathered]


def test_decode_of_nothing() -> None:
    cache, none = PagedCache([3], 4), torch.zeros(1, dtype=torch.int32)
    out, lse = decode(torch.empty(0, 2, L + R), cache.kv_cache, cache.block_table[:0], none[:0], SCALE, L)
    assert (out.shape, lse.shape) == ((0, 2, L), (0, 2))
    out, lse = decode(torch.randn(1, 2, L + R), cache.kv_cache, cache.block_table[:, :0], none, SCALE, L)
    assert torch.equal(out, torch.zeros(1, 2, L))
    assert torch.equal(lse, torch.full((1, 2), -math.inf))


def test_decode_is_an_operator_of_torch() -> None:
    cache = PagedCache([5, 0], 4)
    call = checked_call(
        torch.randn(2, 2, L + R), cache.kv_cache, cache.block_table, cache.seq_lens, SCALE, kv_lora_rank=L
    )
    torch.library.opcheck(torch.ops.dcpmla.mla_decode.default, (*call, *[None] * 6))
