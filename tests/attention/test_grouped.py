"""Attention with keys and values of each head: plain torch against torch's own attention, the kernels against plain
torch, in Triton's interpreter and on a GPU.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla.attention.layers.grouped.attention import grouped_attention, write_keys_values
from dcpmla.attention.layers.grouped.calls import GroupedCall
from dcpmla.attention.layers.grouped.config import GroupedConfig
from dcpmla.attention.layers.grouped.kernels import attention as kernels
from dcpmla.attention.layers.grouped.kernels import write
from dcpmla.attention.layers.grouped.spec import GroupedSpec
from dcpmla.config import DCPConfig
from dcpmla.merge import merge_partials
from dcpmla.ownership import Owner
from tests.support.hopper import ptx_for_hopper
from tests.support.kernels import on, on_both, randn, run_kernels

BLOCK = 4  # tokens of a block on a rank
CONFIG = GroupedConfig(hidden_size=16, num_heads=8, num_kv_heads=4, head_dim=6)
# New tokens of each request, and tokens before them.
DECODES = [(1, 0), (1, 17), (1, 3), (1, 40), (1, 11)]
DRAFTS = [(4, 9), (4, 0), (4, 31)]
PIECES = [(23, 0), (1, 12), (40, 30), (2, 1)]


class Batch:
    """Requests with random queries, keys and values [T, heads, D] of all their tokens, whole and as ranks cache them.

    Args:
        pieces: New tokens of each request, and tokens before them.
        num_padding: Rows of padding after the new tokens.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[int, int]],
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        num_padding: int = 0,
        num_blocks: int = 0,
    ) -> None:
        self.pieces, self.dtype, (num_heads, num_kv_heads, dim) = pieces, dtype, sizes
        self.num_new, self.dim = sum(new for new, _ in pieces), dim
        self.q = randn(self.num_new + num_padding, num_heads, dim, dtype=dtype, seed=1)
        self.kv = [
            randn(new + context, num_kv_heads, 2, dim, dtype=dtype, seed=2 + number)
            for number, (new, context) in enumerate(pieces)
        ]
        columns = [(number, context + at + 1) for number, (new, context) in enumerate(pieces) for at in range(new)]
        request, seen = zip(*columns, *[(0, 0)] * num_padding, strict=True)
        self.request = torch.tensor(request, dtype=torch.int32)
        self.seen = torch.tensor(seen, dtype=torch.int32)
        self.num_blocks = num_blocks

    def call(self, owner: Owner) -> GroupedCall:
        """Return the call of a rank, whose cache holds NaN wherever it has no token."""
        num_columns = max(len(rows) for rows in self.kv) // (BLOCK * owner.size) + 1
        order = torch.randperm(num_columns * len(self.kv), generator=torch.Generator().manual_seed(9))
        table = order.view(len(self.kv), num_columns).to(torch.int32)
        _, num_kv_heads, _, dim = self.kv[0].shape
        cache = torch.full((max(len(order), self.num_blocks), BLOCK, 2 * num_kv_heads * dim), torch.nan)
        cache = cache.to(self.dtype)
        for rows, blocks in zip(self.kv, table, strict=True):
            slots = owner.slot_mapping(torch.arange(len(rows)), blocks, BLOCK)
            write_keys_values.reference(rows.flatten(2), slots, cache)
        lens = owner.local_seq_lens(self.seen)
        return GroupedCall(self.q, cache, table, self.request, lens, dim**-0.5)

    def expected(self) -> Tensor:
        """Return torch's attention of the new tokens."""
        outs, start = [], 0
        for rows, (new, context) in zip(self.kv, self.pieces, strict=True):
            q = self.q[start : start + new].transpose(0, 1)
            k, v = rows.permute(2, 1, 0, 3)
            mask = torch.ones(new, len(rows), dtype=torch.bool).tril(context)
            outs.append(F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(0, 1))
            start += new
        return torch.cat(outs)


@pytest.mark.parametrize("pieces", [DECODES, DRAFTS, PIECES])
@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (2, 1), (4, 2), (8, 4)])
def test_ranks_merge_to_whole_attention(pieces: list[tuple[int, int]], size: int, interleave: int) -> None:
    """Some ranks have no token of a request."""
    batch = Batch(pieces, (6, 2, 10), torch.float64, num_padding=3)
    results = [grouped_attention(batch.call(Owner(rank, size, interleave))) for rank in range(size)]
    outs, lses = map(torch.stack, zip(*results, strict=True))
    assert (outs[lses == -torch.inf] == 0).all()
    out, lse = merge_partials(outs, lses)
    torch.testing.assert_close(out[: batch.num_new], batch.expected(), rtol=1e-6, atol=1e-6)  # the LSE is float32
    assert (lse[batch.num_new :] == -torch.inf).all()


def check_attention(device: str) -> None:
    long = [(1, 700), (3, 0), (1, 513)]  # keys are cut into parts
    cases = [
        (DECODES, (4, 4, 16), torch.float32),
        (DECODES, (6, 2, 10), torch.float16),
        (DRAFTS, (8, 1, 16), torch.float32),
        (PIECES, (6, 2, 24), torch.float32),
        (PIECES, (2, 2, 16), torch.float16),
        (long, (2, 1, 16), torch.float32),
    ]
    if device == "cuda":
        sizes = (64, 64, 128), (64, 8, 128), (12, 4, 112)
        dtypes = torch.bfloat16, torch.float16, torch.float32
        cases = [*itertools.product((DECODES, DRAFTS, PIECES, long), sizes, dtypes)]
    for pieces, heads, dtype in cases:
        if device == "cpu":  # The interpreter runs one program after the other: 16 parts once, else 1 or 4.
            kernels._PROGRAMS = 128 if pieces is long else 32
        for owner in (Owner(), Owner(1, 2, 2)):
            call = Batch(pieces, heads, dtype, num_padding=2).call(owner)
            out, lse = kernels.grouped_attention(on(device, call))
            wide = call._replace(q=call.q.double(), cache=call.cache.double())
            expected, expected_lse = grouped_attention.reference(wide)
            tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
            assert (out.dtype, lse.dtype) == (dtype, torch.float32)
            torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(lse.cpu(), expected_lse, rtol=tolerance, atol=tolerance)
    empty = Batch(DECODES, (4, 4, 16), torch.float32).call(Owner())
    empty = empty._replace(q=empty.q[:0], request=empty.request[:0], seq_lens=empty.seq_lens[:0])
    assert kernels.grouped_attention(on(device, empty))[0].shape == (0, 4, 16)


def check_writes(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        rows = randn(5, 2, 3, 2 * 10, dtype=dtype)[:, 1]  # strided
        slots = torch.tensor([7, -1, 0, 27, -1])
        cache = torch.full((9, 2, BLOCK, 3 * 20), torch.nan, dtype=dtype)[:, 1]
        moved = on(device, [rows, slots, cache])
        write.write_keys_values(*moved)
        write_keys_values.reference(rows, slots, cache)
        torch.testing.assert_close(moved[2].cpu(), cache, rtol=0, atol=0, equal_nan=True)
        assert int((~cache.isnan()).any(-1).sum()) == 3


@on_both
def test_kernels(device: str) -> None:
    run_kernels(device, check_attention, check_writes)


@pytest.mark.gpu
def test_offsets_past_2_to_the_31() -> None:
    width = 2 * 64 * 128
    batch = Batch([(1, 5), (2, 9)], (64, 64, 128), torch.bfloat16, num_blocks=2**31 // (BLOCK * width) + 8)
    call = on("cuda", batch.call(Owner()))
    used = call.block_table.unique()
    moved = len(call.cache) - 1 - torch.arange(len(call.cache), device="cuda")
    call.cache[moved[used.long()]] = call.cache[used.long()]
    far = call._replace(block_table=moved[call.block_table.long()].to(torch.int32))
    assert torch.equal(grouped_attention(far)[0], grouped_attention(call)[0])


@pytest.mark.gpu
def test_a_graph_replays_other_lengths() -> None:
    """Nothing in it waits for the host, and all lengths are read from static memory."""
    call = on("cuda", Batch(DECODES, (8, 2, 128), torch.bfloat16, num_padding=3).call(Owner()))
    graph, lens = torch.cuda.CUDAGraph(), call.seq_lens.clone()
    call.seq_lens.zero_()
    grouped_attention(call)
    with torch.cuda.graph(graph):
        captured, _ = grouped_attention(call)
    call.seq_lens.copy_(lens)
    graph.replay()
    assert torch.equal(captured, grouped_attention(call)[0])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("group", "tokens"), [(1, 1), (8, 1), (1, 64), (8, 8)])
def test_kernels_compile_for_hopper(dtype: str, group: int, tokens: int) -> None:
    types = {"table_ptr": "*i32", "request_ptr": "*i32", "lens_ptr": "*i32", "lse_ptr": "*fp32", "scale": "fp32"}
    sizes = {"GROUP": group, "DIM": 128, "TOKENS": tokens, "ROWS": max(16, group * tokens), "COLUMNS": 128}
    ptx = ptx_for_hopper(kernels.grouped_kernel, dtype, {**sizes, "KEYS": 64 if dtype == "bf16" else 32}, **types)
    assert "ld.global.v4" in ptx or "cp.async" in ptx
    ptx += ptx_for_hopper(write.write_kernel, dtype, {"WIDTH": 256, "COLUMNS": 256}, slots_ptr="*i64")
    assert not re.search(r"(st|ld)\.global\.b(8|16)\b", ptx)


def test_layouts_that_heads_do_not_divide_by_are_refused() -> None:
    three = GroupedSpec(replace(CONFIG, num_heads=6, num_kv_heads=3))
    with pytest.raises(
        ValueError, match=r"^tensor_parallel_size .* is 3; it must divide the layer's 8 attention heads"
    ):
        GroupedSpec(CONFIG).check_layout(DCPConfig(tensor_parallel_size=3))
    with pytest.raises(ValueError, match=r"^tensor_parallel_size .* is 2; it must divide the layer's 3 heads of keys"):
        three.check_layout(DCPConfig(tensor_parallel_size=2))
    with pytest.raises(ValueError, match=r"^decode_context_parallel_size .* is 3, which makes 2 groups .* 3 heads of"):
        three.check_layout(DCPConfig(tensor_parallel_size=6, decode_context_parallel_size=3))
    with pytest.raises(ValueError, match="num_key_value_heads is 3; it must divide num_attention_heads 8"):
        replace(CONFIG, num_kv_heads=3)
    with pytest.raises(ValueError, match="head_dim is 5; it must be an even number"):
        replace(CONFIG, head_dim=5)


@pytest.mark.parametrize(("kv_cache_dtype", "itemsize"), [("auto", 2), ("fp8", 1), ("fp8_ds_mla", 1)])
def test_rows_keep_16_bits_and_the_heads_of_a_group(kv_cache_dtype: str, itemsize: int) -> None:
    for tp, dcp, num_heads, num_shares in ((1, 1, 4, 1), (2, 2, 4, 1), (4, 2, 2, 2), (8, 1, 1, 4), (8, 8, 4, 1)):
        layout = DCPConfig(tensor_parallel_size=tp, decode_context_parallel_size=dcp, kv_cache_dtype=kv_cache_dtype)
        memory = GroupedSpec(CONFIG).memory(layout, torch.bfloat16, 0)
        assert (memory.row_width * itemsize, memory.num_shares) == (2 * 2 * 6 * num_heads, num_shares)
