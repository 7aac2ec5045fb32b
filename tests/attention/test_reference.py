"""The plain-torch attention, which every kernel is held against, against softmax attention written out in float64,
token by token.
"""

import math
import random
from collections.abc import Sequence
from unittest.mock import patch

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


# Of outputs, then of LSEs, which are float32. Inputs are exact in 16 bits: what is left is one rounding of the output.
TOLERANCES = {
    torch.float64: ({"atol": 1e-12, "rtol": 1e-12}, {"atol": 1e-6, "rtol": 2**-23}),
    torch.float32: ({"atol": 1e-5, "rtol": 0.0}, {"atol": 1e-5, "rtol": 1e-6}),
    torch.bfloat16: ({"atol": 1e-5, "rtol": 2**-8}, {"atol": 1e-5, "rtol": 0.0}),
    torch.float16: ({"atol": 1e-5, "rtol": 2**-11}, {"atol": 1e-5, "rtol": 0.0}),
}


def check_close(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], dtype: torch.dtype, **of_out: float) -> None:
    """Compare (out, lse) in a dtype with float64; of_out: Tolerances of out in place of the dtype's."""
    assert (got[0].dtype, got[1].dtype) == (dtype, torch.float32)
    for one, other, tolerance in zip(got, wanted, TOLERANCES[dtype], strict=True):
        torch.testing.assert_close(one.double(), other, **(of_out if of_out and one is got[0] else tolerance))


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
    form=st.sampled_from([(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float64, 1e-4), (torch.float64, 1e3)]),
    max_gathered=st.sampled_from([1, 100, 1000, 1 << 28]),
    seed=st.integers(0, 10**6),
)
def test_decode(
    requests: list[tuple[int, int]],
    sizes: tuple[int, int],
    garbage: tuple[float, bool],
    is_uniform: bool,
    padding: int,
    form: tuple[torch.dtype, float],
    max_gathered: int,
    seed: int,
) -> None:
    """Ragged lengths, some empty. Query tokens of a request share its blocks; each sees the first tokens of the cache,
    up to its own bound; padding sees none. The cache is a layer's slice of a larger one, the table the first columns of
    a wider one. Scores of thousands overflow an exp that does not subtract the maximum.
    """
    draw, (num_heads, block_size), (dtype, magnitude) = random.Random(seed), sizes, form
    query_lens = [requests[0][0] if is_uniform else query for query, _ in requests]
    lens = [length for _, length in requests]
    cache = PagedCache(lens, block_size, dtype, seed, garbage[0], pads_with_block=garbage[1])
    bounds = [
        sorted(draw.randint(length if query == 1 else 0, length) for _ in range(query))
        for query, length in zip(query_lens, lens, strict=True)
    ]
    sequences = [cache.sequences[request][:bound] for request, seen in enumerate(bounds) for bound in seen]
    seq_lens = torch.tensor([bound for seen in bounds for bound in seen], dtype=torch.int32)
    q = magnitude * torch.randn(len(sequences), num_heads, L + R, generator=torch.Generator().manual_seed(seed))
    q = q.to(dtype)
    wanted = naive_decode(q, sequences, SCALE)
    layers = torch.stack([torch.full_like(cache.kv_cache, math.nan), cache.kv_cache], 1)
    wide = torch.cat([cache.block_table, torch.full_like(cache.block_table, 10**6)], 1)
    rows = layers[:, 1], wide[:, : cache.block_table.shape[1]]
    tolerance = {"atol": 1e-10, "rtol": 1e-10} if magnitude > 1 else {}
    if is_uniform:
        numbers, tiles, compute = (seq_lens, SCALE, L), [], reference._decode_tile
        watched = lambda *call: (tiles.append(call), compute(*call))[1]  # noqa: E731
        tokens_of_tile = max(1, max_gathered // (rows[1].shape[1] * block_size * (L + R)))
        with patch.multiple(reference, _decode_tile=watched, _MAX_GATHERED=max_gathered):
            got = decode(q, *rows, *numbers, max_query_len=query_lens[0])
            assert len(tiles) == -(-len(q) // tokens_of_tile)
            parts = decode(in_parts(q, L), *rows, *numbers, max_query_len=query_lens[0])
        check_close(got, wanted, dtype, **tolerance)
        torch.testing.assert_close(parts, got, atol=0, rtol=0)
    start_loc = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    padded_q = torch.cat([q, q[:1].expand(padding, -1, -1)])
    padded_lens = torch.cat([seq_lens, seq_lens.new_zeros(padding)])
    ragged = {"query_start_loc": start_loc, "max_query_len": max(query_lens)}
    out, lse = decode(padded_q, *rows, padded_lens, SCALE, L, **ragged)
    check_close((out[: len(q)], lse[: len(q)]), wanted, dtype, **tolerance)
    assert not out[len(q) :].any()
    assert (lse[len(q) :] == -math.inf).all()


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
