"""The choice between a piece's two routes: measured times, sums and properties."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpmla.attention.costs import Rates, RouteCosts
from dcpmla.cli.doctor import CONFIG
from dcpmla.config import DCPConfig
from dcpmla.indexer_config import IndexerConfig
from tests.support.layouts import dcp_config

# One layer on one H100 in bfloat16, by number of heads: requests x new tokens @ context, us of MHA / absorbed.
MEASURED = {
    128: """
        1x8@65536 5068/408 1x64@65536 5219/1988 1x128@65536 5317/4166 1x192@65536 5800/6352 1x256@65536 6353/8555
        16x8@65536 84385/4050 16x8@8192 10929/663 16x64@8192 11558/4691 16x128@8192 12167/9749
        16x192@8192 15138/14436 16x256@8192 16694/18539
        1x64@8192 813/405 1x128@8192 827/649 1x192@8192 922/908 1x256@8192 916/1157
    """,
    16: """
        1x8@65536 1418/104 1x128@65536 1412/578 1x256@65536 1441/1040 16x8@65536 12508/549 16x8@8192 1537/138
        16x64@8192 1625/615 16x128@8192 1748/1259 16x192@8192 2023/1951 16x256@8192 2166/2732 1x256@8192 254/198
    """,
}
CASES = [
    (heads, *map(int, numbers))
    for heads, table in MEASURED.items()
    for numbers in re.findall(r"(\d+)x(\d+)@(\d+) (\d+)/(\d+)", table)
]
DENSE = replace(CONFIG, softmax_scale=0.1)
INDEXER = IndexerConfig(num_heads=64, head_dim=128, topk=2048, rope_interleaved=False)
SPARSE = replace(DENSE, indexer=INDEXER)
FREE = Rates(matmul_tflops=1e18, mha_tflops=1e18, absorbed_tflops=1e18, call_us=0)  # products in no time
ROW_BYTES = {"bf16": 1152, "fp8": 576, "fp8_ds_mla": 656}

lengths = st.tuples(st.integers(1, 9000), st.integers(0, 200_000))


@st.composite
def route_costs(draw: st.DrawFn) -> RouteCosts:
    tp = draw(st.sampled_from([1, 2, 8]))
    dcp = dcp_config(
        tp,
        draw(st.sampled_from([size for size in (1, 2, 8) if size <= tp])),
        kv_cache_dtype=draw(st.sampled_from(sorted(ROW_BYTES))),
    )
    return RouteCosts(replace(draw(st.sampled_from([DENSE, SPARSE])), num_heads=draw(st.sampled_from([16, 128]))), dcp)


@pytest.mark.parametrize(("heads", "num_reqs", "new", "context", "mha", "absorbed"), CASES)
def test_the_chosen_route_is_near_the_faster_one(
    heads: int, num_reqs: int, new: int, context: int, mha: int, absorbed: int
) -> None:
    costs = RouteCosts(replace(DENSE, num_heads=heads), DCPConfig())
    chosen = set(costs.choose_absorbed([(new, context)] * num_reqs))
    assert len(chosen) == 1
    assert (absorbed if chosen == {True} else mha) <= 1.15 * min(mha, absorbed)


@given(costs=route_costs(), pieces=st.lists(lengths, min_size=1, max_size=12))
def test_each_piece_takes_the_cheaper_route(costs: RouteCosts, pieces: list[tuple[int, int]]) -> None:
    """MHA's programs of all pieces of a step share the GPU."""
    heads = costs.config.heads_per_rank(costs.dcp.tensor_parallel_size)
    num_tiles = sum(heads * -(-new // 128) for new, _ in pieces)
    mha = [costs.mha_us(*piece, num_tiles) for piece in pieces]
    absorbed = [costs.absorbed_us(*piece) for piece in pieces]
    chosen = costs.choose_absorbed(pieces)
    times = [absorbed[index] if is_absorbed else mha[index] for index, is_absorbed in enumerate(chosen)]
    assert times == [min(pair) for pair in zip(mha, absorbed, strict=True)]
    assert costs.choose_absorbed(pieces[::-1]) == chosen[::-1]


@pytest.mark.parametrize(
    ("heads", "tp", "dcp", "width"), [(128, 1, 1, 1), (128, 8, 1, 8), (128, 8, 8, 1), (16, 1, 1, 8), (16, 8, 2, 32)]
)
def test_a_group_of_tokens_fills_two_tiles_of_the_decode_kernels(heads: int, tp: int, dcp: int, width: int) -> None:
    """128 rows: the heads of a DCP group times the tokens that attend side by side."""
    layout = DCPConfig(tensor_parallel_size=tp, decode_context_parallel_size=dcp)
    assert RouteCosts(replace(DENSE, num_heads=heads), layout).tokens_per_request == width


@pytest.mark.parametrize("kv_cache_dtype", ROW_BYTES)
@pytest.mark.parametrize("size", [1, 2, 8])
def test_the_exchange_by_hand(kv_cache_dtype: str, size: int) -> None:
    """On a GPU that does all else in no time: MHA gathers the other ranks' rows of the context, absorbed attention
    queries and partial outputs of 16 heads.
    """
    layout = DCPConfig(tensor_parallel_size=8, decode_context_parallel_size=size, kv_cache_dtype=kv_cache_dtype)
    costs = RouteCosts(DENSE, layout, replace(FREE, gb_per_s=1e18))
    of_others = (size - 1) / size
    assert costs.mha_us(64, 8192, 16) == pytest.approx(8192 * ROW_BYTES[kv_cache_dtype] * of_others / 275e3, abs=1e-6)
    sent = 64 * 16 * (size - 1) * (576 + 512) * 2
    assert costs.absorbed_us(64, 8192) == pytest.approx(sent / 275e3, abs=1e-6)


@pytest.mark.parametrize("kv_cache_dtype", ROW_BYTES)
def test_reading_by_hand(kv_cache_dtype: str) -> None:
    """On a GPU that multiplies in no time: absorbed attention reads the cache once for each group of tokens, MHA moves
    the context twice and reads and writes keys and values.
    """
    costs = RouteCosts(DENSE, DCPConfig(tensor_parallel_size=8, kv_cache_dtype=kv_cache_dtype), FREE)
    row_bytes, new, context = ROW_BYTES[kv_cache_dtype], 20, 8192
    assert costs.absorbed_us(new, context) == pytest.approx(3 * (new + context) * row_bytes / 2.7e6)  # groups of 8
    kv_bytes = (new + context) * 16 * (128 + 128) * 2
    assert costs.mha_us(new, context, 16) == pytest.approx((4 * context * row_bytes + 2 * kv_bytes) / 2.7e6)


@given(new=st.integers(1, 300), context=st.integers(0, 100_000), size=st.sampled_from([1, 8]))
def test_a_selection_bounds_absorbed_attention(new: int, context: int, size: int) -> None:
    layout = DCPConfig(tensor_parallel_size=8, decode_context_parallel_size=size)
    dense, sparse = RouteCosts(DENSE, layout), RouteCosts(SPARSE, layout)
    tiles = dense.num_tiles(new)
    if context + new <= INDEXER.topk:
        assert sparse.absorbed_us(new, context) == dense.absorbed_us(new, context)
        assert sparse.mha_us(new, context, tiles) == dense.mha_us(new, context, tiles)
    else:
        assert sparse.absorbed_us(new, context) == sparse.absorbed_us(new, 10 * context + INDEXER.topk)
        assert sparse.mha_us(new, context, tiles) >= dense.mha_us(new, context, tiles)
