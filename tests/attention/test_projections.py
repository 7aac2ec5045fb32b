"""Norms, RoPE and absorbed projections: the torch code against transformers and whole keys; operators as tracing sees
them.
"""

import itertools

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RMSNorm,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from dcpmla.attention import projections
from dcpmla.attention.mla.prefill import read_cache_rows
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.comm.nccl import merge_rows, weigh_rows
from tests.attention.test_small_kernels import BLOCK_SIZE, DTYPES, NUM_BLOCKS, ODD, latents_case, query_case
from tests.support.kernels import cut, on, on_both, randn


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_rounds_as_transformers(dtype: torch.dtype) -> None:
    theirs = DeepseekV3RMSNorm(40, eps=1e-3).to(dtype)
    theirs.weight.data = 0.5 + randn(40, dtype=dtype).abs()
    x = cut(randn(9, 40, dtype=dtype, seed=1))
    assert torch.equal(projections.rms_norm(x, theirs.weight.data, 1e-3), theirs(x).detach())


@pytest.mark.parametrize("interleaved", [True, False])
def test_latents_are_transformers(interleaved: bool) -> None:
    """Norms and rotation as its attention does them, and each row where its slot says."""
    q_rank, rank, width, *_ = ODD
    slots = [3, -1, 27, -1, 0]
    arguments = latents_case(ODD, slots, torch.float32, True, interleaved)
    down, cache, _, q_weight, kv_weight, eps, scale, cos_sin, *_ = arguments
    q_c, latents, *_ = projections.norm_rope_cache(arguments)
    norms = {}
    for weight in (q_weight, kv_weight):
        norms[weight] = DeepseekV3RMSNorm(len(weight), eps)
        norms[weight].weight.data = weight
    k_pe = down[None, None, :, q_rank + rank :]
    cos, sin = (torch.cat([part, part], -1)[None] for part in cos_sin.chunk(2, -1))
    rotate = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
    rotated = rotate(k_pe, k_pe, cos, sin)[0][0, 0]
    if interleaved:  # transformers leaves pairs split into halves
        rotated = torch.stack(rotated.chunk(2, -1), -1).flatten(-2)
    torch.testing.assert_close(q_c, norms[q_weight](down[:, :q_rank]).detach())
    torch.testing.assert_close(latents[:, :rank], scale * norms[kv_weight](down[:, q_rank : q_rank + rank]).detach())
    torch.testing.assert_close(latents[:, rank:], rotated)
    for row, slot in zip(latents, slots, strict=True):
        assert slot < 0 or torch.equal(cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE], row)
    assert int((~cache.isnan()).any(-1).sum()) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_absorbed_scores_and_values_are_those_of_whole_keys(dtype: torch.dtype) -> None:
    """(q_nope W_UK) kv_c = q_nope (W_UK kv_c), and W_UV (p kv_c) = p (W_UV kv_c)."""
    _, rank, width, nope, value, heads = ODD
    call = query_case(ODD, 5, dtype, True, True)
    q, w_uk, cos_sin, *_ = call
    assert cos_sin is not None
    kv_c, w_uv = randn(5, rank, dtype=dtype, seed=7), randn(heads, value, rank, dtype=dtype, seed=8)
    absorbed = projections.absorb_query(call)
    rotated = q.clone()
    projections.rotate_query_(rotated, cos_sin, True)
    assert torch.equal(rotated[..., :nope], q[..., :nope])
    assert torch.equal(absorbed[..., rank:], rotated[..., nope:])
    torch.testing.assert_close(
        torch.einsum("thl,sl->ths", absorbed[..., :rank], kv_c),
        torch.einsum("thp,hpl,sl->ths", q[..., :nope], w_uk, kv_c),
    )
    weights = randn(5, heads, 5, dtype=dtype, seed=9)
    values = projections.project_values(ValueProjection(torch.einsum("ths,sl->thl", weights, kv_c), w_uv))
    torch.testing.assert_close(values.view(5, heads, value), torch.einsum("ths,hvl,sl->thv", weights, w_uv, kv_c))


@on_both
def test_operators(device: str) -> None:
    """Check schema, shapes and strides that tracing is told, what is written: `torch.library.opcheck`."""
    for slots in ([3, -1, 0], []):
        for sizes, rope in itertools.product((ODD, (0, *ODD[1:])), (True, False)):
            torch.library.opcheck(
                projections.norm_rope_cache.op, on(device, latents_case(sizes, slots, torch.float32, rope, True))
            )
        mixed = latents_case(ODD, slots, torch.bfloat16, True, True)
        assert mixed.q_weight is not None
        mixed = mixed._replace(q_weight=mixed.q_weight.float(), kv_weight=mixed.kv_weight.float())
        torch.library.opcheck(projections.norm_rope_cache.op, on(device, mixed))
        queries = on(device, query_case(ODD, len(slots), torch.float32, True, False))
        torch.library.opcheck(projections.absorb_query.op, queries)
        torch.library.opcheck(projections.rotate_query_.op, [queries[0], *queries[2:4]])
        values = ValueProjection(randn(len(slots), 3, 40), randn(3, 17, 40)[:, 12:])
        torch.library.opcheck(projections.project_values.op, on(device, values))
        rows = [randn(NUM_BLOCKS, 2, BLOCK_SIZE, 7)[:, 1], torch.tensor(slots, dtype=torch.int64).abs()]
        torch.library.opcheck(read_cache_rows.op, on(device, rows))
        for num_heads in (1, 3):
            received = randn(
                2, len(slots), num_heads, 16
            )  # rows with their LSE after them, as the exchange receives them
            torch.library.opcheck(merge_rows.op, on(device, [received[..., :8], received[..., 8]]))
            torch.library.opcheck(
                weigh_rows.op,
                on(device, [cut(randn(len(slots), 2 * num_heads, 8)), randn(2, len(slots), 2 * num_heads), 1]),
            )
