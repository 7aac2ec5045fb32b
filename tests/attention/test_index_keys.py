"""The indexer's cache, projections and scores in plain torch: formats, transformers' indexers."""

from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

from dcpmla.attention.select.calls import IndexNorm, IndexQueries, IndexRotation
from dcpmla.attention.select.projections import norm_rope_index_keys, rope_index_queries
from dcpmla.attention.select.scores import index_scores
from dcpmla.cache.formats import FP8, FP8_MAX
from dcpmla.cache.index_keys import check_index_cache, index_row_width, index_to_fp8, read_index_keys, write_index_keys
from tests.support.kernels import randn

HEADS, HEAD_DIM, ROPE, TOPK = 32, 32, 8, 6
BLOCK_SIZE, NUM_BLOCKS = 16, 5


@given(
    st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=9),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_e4m3_with_the_smallest_power_of_two_that_cuts_nothing_off(values: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor([values]).to(dtype)
    x = x.where(x.isfinite(), 0)
    codes, scales = index_to_fp8(x)
    mantissa, _ = torch.frexp(scales)
    assert mantissa.item() == 0.5
    wide, amax = x.double(), x.double().abs().max().clamp(min=1e-10)
    assert amax <= FP8_MAX * scales.double() < 2 * amax
    got = codes.double() * scales.double()[:, None]
    error = torch.maximum(wide.abs() / 16, scales.double()[:, None] * 2**-10)  # half a step: of 3 bits, of denormals
    assert ((got - wide).abs() <= error).all()


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_keys_come_back_from_where_their_slots_say(storage: torch.dtype) -> None:
    keys, slots = randn(6, HEAD_DIM, dtype=torch.bfloat16), torch.tensor([40, -1, 15, 16, -1, 79])
    cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, index_row_width(storage, HEAD_DIM), dtype=storage)
    check_index_cache(cache, storage, HEAD_DIM)
    write_index_keys(cache, keys, slots)
    codes, scales = read_index_keys(cache, torch.arange(NUM_BLOCKS))
    read = codes.float() if scales is None else codes.float() * scales[..., None]
    for key, slot in zip(keys.float(), slots, strict=True):
        mine = read[slot // BLOCK_SIZE, slot % BLOCK_SIZE]
        assert slot < 0 or torch.allclose(
            mine, key, rtol=0 if scales is None else 1 / 16, atol=0 if scales is None else 0.01
        )
    assert int(read.any(-1).sum()) == 4
    if scales is not None:  # a block's codes, then its scales
        expected_codes, expected_scales = index_to_fp8(keys[2])
        block = cache[0].flatten()
        assert torch.equal(block[15 * HEAD_DIM : 16 * HEAD_DIM], expected_codes.view(torch.uint8))
        assert torch.equal(block[BLOCK_SIZE * HEAD_DIM :].view(torch.float32)[15], expected_scales)
    for wrong in (cache[..., :-1], cache.double(), cache.transpose(0, 1)):
        with pytest.raises(ValueError, match="--index-cache-dtype"):
            check_index_cache(wrong, storage, HEAD_DIM)


CONFIG: dict[str, Any] = {"hidden_size": 48, "q_lora_rank": 24, "qk_rope_head_dim": ROPE, "index_topk": TOPK}
CONFIG |= {"index_n_heads": HEADS, "index_head_dim": HEAD_DIM}
INDEXERS = {
    "deepseek_v32": (transformers.DeepseekV32Config, modeling_deepseek_v32, "DeepseekV32Indexer", False),
    "glm_moe_dsa": (transformers.GlmMoeDsaConfig, modeling_glm_moe_dsa, "GlmMoeDsaIndexer", True),
}


@pytest.mark.parametrize("family", INDEXERS)
def test_scores_are_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, with and without the Hadamard transform; roughly where keys and queries are rounded to e4m3."""
    config, module, name, interleaved = INDEXERS[family]
    num_tokens = 70
    torch.manual_seed(0)
    indexer = getattr(module, name)(config(**CONFIG), 0)
    for parameter in indexer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    hidden, q_c = randn(num_tokens, 48), randn(num_tokens, 24, seed=1)
    angles = randn(num_tokens, ROPE // 2, seed=2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    causal = torch.ones(num_tokens, num_tokens).tril().bool()
    wanted, selected = run_theirs(module, indexer, hidden, q_c, angles, causal, monkeypatch)

    keys, weights = (
        torch.cat([indexer.wk(hidden), indexer.weights_proj(hidden)], -1).detach().tensor_split((HEAD_DIM,), -1)
    )
    queries = indexer.wq_b(q_c).detach().unflatten(-1, (HEADS, HEAD_DIM))
    norm = indexer.k_norm.weight.detach(), indexer.k_norm.bias.detach()
    lens = torch.arange(1, num_tokens + 1, dtype=torch.int32)
    table = torch.tensor([[4, 0, 2, 1, 3, -7]], dtype=torch.int32)  # the last one is none
    index = torch.arange(num_tokens)
    slots = table[0, index // BLOCK_SIZE].long() * BLOCK_SIZE + index % BLOCK_SIZE
    for hadamard, is_fp8 in ((False, False), (True, False), (False, True), (True, True)):
        storage = torch.uint8 if is_fp8 else torch.float32
        cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, index_row_width(storage, HEAD_DIM), dtype=storage)
        rotation = IndexRotation(cos_sin, interleaved, hadamard)
        norm_rope_index_keys(keys, cache, slots, IndexNorm(*norm), rotation)
        q, factors = rope_index_queries(queries, weights, rotation, is_fp8)
        assert q.dtype == (FP8 if is_fp8 else torch.float32)
        request = torch.zeros(num_tokens, dtype=torch.int32)
        got = index_scores(IndexQueries(q, factors, cache, table, request, lens, lens, 0))[:, :num_tokens]
        last = index_scores(IndexQueries(q[-1:], factors[-1:], cache, table, request[-1:], lens[-1:], lens[-1:], 0))
        assert torch.equal(last[:, :num_tokens], got[-1:]), "scores depend on what else is scored"
        got = got.masked_fill(~causal, -torch.inf)
        error = (got - wanted)[causal].square().mean().sqrt() / wanted[causal].std()
        assert error < (0.05 if is_fp8 else 1e-6)
        if not is_fp8:
            ours = got[TOPK:].topk(TOPK).indices.sort().values
            assert torch.equal(ours, selected[TOPK:].sort().values)


def run_theirs(
    module: ModuleType,
    indexer: torch.nn.Module,
    hidden: Tensor,
    q_c: Tensor,
    angles: Tensor,
    causal: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Tensor, Tensor]:
    """Return transformers' scores, caught where it masks them, and its selection."""
    scores = []
    whole = torch.matmul

    def catch(a: Tensor, b: Tensor) -> Tensor:
        scores.append(whole(a, b))
        return scores[-1]

    with monkeypatch.context() as patch:
        patch.setattr(module.torch, "matmul", catch)
        cos, sin = (torch.cat([part, part], -1)[None] for part in (angles.cos(), angles.sin()))
        selected = indexer(hidden[None], q_c[None], (cos, sin), causal[None], None)
    return scores[-1].squeeze(-2)[0], selected[0].long()


def test_operators() -> None:
    """Schema, shapes and strides that tracing is told, what is written: `torch.library.opcheck`."""
    slots, table = torch.tensor([3, -1, 0]), torch.tensor([[0, 1]], dtype=torch.int32)
    keys, weights = randn(3, HEAD_DIM + HEADS).tensor_split((HEAD_DIM,), -1)
    q, cos_sin, lens = randn(3, HEADS, HEAD_DIM), randn(3, ROPE, seed=1), torch.tensor([9, 20, 30], dtype=torch.int32)
    for is_fp8 in (True, False):
        storage = torch.uint8 if is_fp8 else torch.float32
        cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, index_row_width(storage, HEAD_DIM), dtype=storage)
        torch.library.opcheck(
            norm_rope_index_keys.op, (keys, cache, slots, *randn(2, HEAD_DIM), 1e-6, cos_sin, True, True)
        )
        torch.library.opcheck(rope_index_queries.op, (q, weights, cos_sin, False, True, is_fp8))
        if not is_fp8:  # opcheck multiplies what it is given, which e4m3 cannot
            torch.library.opcheck(index_scores.op, (q, weights, cache, table, torch.zeros_like(lens), lens, lens, TOPK))
