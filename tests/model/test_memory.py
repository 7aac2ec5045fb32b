"""Memories of n-grams: against the published formula in float64, on one rank and on two, and their kernels.

Kernels run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from dcpmla.comm.reduce import CollectiveReduce
from dcpmla.model.memory import NgramMemory, add_recalled, look_up
from dcpmla.model.mixing import Mixing, Streams
from dcpmla.model.streams import finish
from dcpmla.parallel.formats import Quantized, cut
from dcpmla.parallel.linear import Linear
from tests.attention.test_decode_compile import compile_for_hopper
from tests.support.kernels import on_both, run_kernels
from tests.support.ranks import run_ranks

FP8 = torch.float8_e4m3fn
EPS, STREAMS, WIDTH, COLUMNS, HIDDEN = 1e-6, 4, 64, 6, 40
BUCKETS = [11, 13, 17, 19, 23, 29]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_table() -> Quantized:
    scales = torch.randint(120, 126, (sum(BUCKETS), WIDTH // 32), generator=torch.Generator().manual_seed(3))
    return Quantized((20 * draw(sum(BUCKETS), WIDTH)).to(FP8), scales.to(torch.uint8))


def values_of(table: Quantized) -> Tensor:
    """Return the values, float64."""
    return table.codes.double() * (2.0 ** (table.scales.double() - 127)).repeat_interleave(32, 1)


def draw_hashes(num_tokens: int) -> Tensor:
    """Return rows [T, C] of the whole table."""
    generator, starts = torch.Generator().manual_seed(4), torch.tensor([0, *BUCKETS[:-1]]).cumsum(0)
    rows = [torch.randint(size, (num_tokens,), generator=generator) for size in BUCKETS]
    return torch.stack(rows, 1) + starts


def exact(streams: Tensor, recalled: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the streams with the memory added, float64, by its published formula."""
    streams, recalled = streams.double(), recalled.double()
    num_tokens, num_streams, width = streams.shape
    key, value = recalled.split([num_streams * width, width], 1)
    key = F.rms_norm(key.view(num_tokens, num_streams, width), [width], eps=EPS) * keys.double()
    query = F.rms_norm(streams, [width], eps=EPS) * queries.double()
    likeness = (query * key).sum(2) / width**0.5
    root = likeness.abs().clamp(min=1e-6).sqrt()
    gate = torch.where(likeness < 0, -root, root).sigmoid()
    return streams + gate[..., None] * value[:, None]


def check_adding(function: Any, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for num_tokens, num_streams, width in ((3, 4, 48), (1, 2, 200), (5, 1, 128)):
            streams = (3 * draw(num_tokens, num_streams, width, seed=1)).to(device, dtype)
            recalled = draw(num_tokens, (num_streams + 1) * width, seed=2).to(device, dtype)
            recalled[0, :width] = 0  # a likeness of 0
            queries, keys = draw(2, num_streams, width, seed=3).to(device)
            got = function(streams, recalled, queries * keys, EPS)
            assert got.dtype == dtype
            torch.testing.assert_close(
                got.double(), exact(streams, recalled, queries, keys), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
            )


def check_lookups(function: Any, device: str) -> None:
    """Look up rows of codes, exactly, and of numbers."""
    table, hashes = make_table(), draw_hashes(5).int()
    expected = values_of(table)[hashes].flatten(1)
    on_device = table.map(lambda part: part.to(device))
    for dtype in (torch.float32, torch.bfloat16):
        got = function(*on_device[:2], hashes.to(device), dtype)
        assert got.dtype == dtype
        assert torch.equal(got.double().cpu(), expected)
    plain = draw(sum(BUCKETS), 24).to(device)
    assert torch.equal(function(plain, None, hashes.to(device), torch.float32), plain[hashes.to(device)].flatten(1))


def test_against_float64() -> None:
    check_adding(add_recalled, "cpu")
    check_lookups(look_up, "cpu")


def check_ranks() -> None:
    """Compare a rank's buckets and columns, summed over the ranks, with the whole memory, in streams that wait."""
    group = dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    columns = cut(COLUMNS, rank, size)
    starts = [0, *torch.tensor(BUCKETS).cumsum(0).tolist()]
    rows = slice(starts[columns.start], starts[columns.stop])
    table, hashes = make_table(), draw_hashes(7)
    weight = draw((STREAMS + 1) * HIDDEN, COLUMNS * WIDTH, seed=5) / 20
    queries, keys = draw(2, STREAMS, HIDDEN, seed=6)
    linear = Linear((columns.stop - columns.start) * WIDTH, len(weight), dtype=torch.float32)
    linear.load(weight[:, columns.start * WIDTH : columns.stop * WIDTH])
    part = table.map(lambda tensor: tensor[rows])
    memory = NgramMemory(1, part, linear, queries * keys, EPS, CollectiveReduce(group))
    values, out = draw(7, STREAMS, HIDDEN, seed=7), draw(7, HIDDEN, seed=8)
    mixing = Mixing(draw(7, STREAMS, seed=9), draw(7, STREAMS, STREAMS, seed=10).softmax(1))
    streams = Streams(values, mixing, out)
    own = (hashes[:, columns] - rows.start).int()
    got = memory(streams, torch.stack([torch.zeros_like(own), own]))
    assert got.mixing is None
    assert got.out is None
    recalled = values_of(table)[hashes].flatten(1) @ weight.double().T
    torch.testing.assert_close(
        got.values.double(), exact(finish(streams), recalled, queries, keys), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks(num_ranks: int) -> None:
    run_ranks(num_ranks, check_ranks)


def test_the_operators() -> None:
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(add_recalled.op, (draw(2, 3, 8), draw(2, 32), draw(3, 8), EPS), test_utils=checks)
    arguments = draw(sum(BUCKETS), 24), None, draw_hashes(3).int(), torch.float32
    torch.library.opcheck(look_up.op, arguments, test_utils=checks)


def check_kernels(device: str) -> None:
    from dcpmla.model.kernels import memory as kernels

    check_adding(kernels.add_recalled, device)
    check_lookups(kernels.look_up, device)
    arguments = draw(9, 24).to(device), None, draw_hashes(0).int().to(device), torch.float32
    assert kernels.look_up(*arguments).shape == (0, 144)


@on_both
def test_the_kernels(device: str) -> None:
    run_kernels(device, check_kernels)


def test_the_kernels_compile() -> None:
    """Compile for the sizes of DeepSeek-V4.1: rows of 256 codes, streams of 4,096 columns stay in registers."""
    from triton.compiler import ASTSource

    from dcpmla.model.kernels.memory import add_recalled_kernel, look_up_kernel

    types = {"table_ptr": "*fp8e4nv", "scales_ptr": "*u8", "index_ptr": "*i32", "out_ptr": "*bf16"}
    constants = {"WIDTH": 256, "COLUMNS": 256, "ROWS": 8}
    _, said = compile_for_hopper(look_up_kernel, ASTSource, types, constants, num_warps=4)
    assert "0 bytes spill stores" in said
    types = dict.fromkeys(("streams_ptr", "recalled_ptr", "out_ptr"), "*bf16") | {"weight_ptr": "*fp32", "eps": "fp32"}
    constants = {"STREAMS": 4, "WIDTH": 4096, "COLUMNS": 4096}
    _, said = compile_for_hopper(add_recalled_kernel, ASTSource, types, constants, num_warps=8)
    assert "0 bytes spill stores" in said
