"""Attention that sends its rows itself equals attention followed by `combine`: eager, in graphs, with empty shards."""

import random
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.attention.backends.calls import decode_workspace
from dcpmla.attention.mla.decode import dcp_mla_decode, decode_call
from dcpmla.attention.step.metadata import DecodeMetadata
from dcpmla.cache.shared_format import rows_shape
from dcpmla.cache.shared_rows import write_rows
from dcpmla.comm.direct import DirectExchange
from dcpmla.comm.nccl import AllToAll
from tests.support.gpus import on_gpus
from tests.support.ranks import run_ranks

LENGTHS = (0, 1, 63, 64, 65, 300, 2000)
NUM_HEADS, SCALE = 128, 0.07


class WithoutMailbox:
    """The exchange `direct` as two operations, attention and combine."""

    def __init__(self, exchange: DirectExchange) -> None:
        self._exchange = exchange

    def mailbox(self, *_: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)


def draw(num_tokens: int, device: torch.device, rows: str) -> tuple[Tensor, Tensor, DecodeMetadata]:
    """Draw this rank's queries, cache and lengths; on rank 1 all shards are empty.

    Args:
        rows: "latents" in blocks, or single rows of shared keys in bfloat16 or in fp8_ds_mla.
    """
    rank, rng = dist.get_rank(), random.Random(100 * num_tokens + dist.get_rank())
    lens = [0 if rank == 1 else rng.choice(LENGTHS) for _ in range(num_tokens)]
    generator = torch.Generator(device).manual_seed(rank)
    block_size, width = (64, 576) if rows == "latents" else (1, 512)
    num_blocks = max(1, -(-max(lens) // block_size))
    table = torch.arange(num_tokens * num_blocks, dtype=torch.int32, device=device).view(num_tokens, num_blocks)
    cache = torch.randn(table.numel(), block_size, width, generator=generator, device=device).bfloat16()
    if rows == "fp8_ds_mla":
        values, shape = cache[:, 0], rows_shape(len(cache), width, torch.uint8)
        cache = torch.empty(shape, dtype=torch.uint8, device=device)
        write_rows(cache, values, torch.arange(len(values), device=device))
    q_shape = num_tokens, NUM_HEADS // dist.get_world_size(), width
    q = torch.randn(q_shape, generator=generator, device=device).bfloat16()
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    return q, cache, DecodeMetadata(table, seq_lens, None, 1, decode_workspace(device))


def decode(q: Tensor, cache: Tensor, step: DecodeMetadata, exchange: Any) -> tuple[Tensor, Tensor]:
    return dcp_mla_decode(decode_call(exchange.gather_heads(q), cache, step, SCALE, 512), exchange)


def check_rows() -> None:
    device = torch.device("cuda", dist.get_rank())
    direct, a2a = DirectExchange(dist.group.WORLD, device, timeout=20), AllToAll(dist.group.WORLD)
    for num_tokens, rows in product((1, 2, 3, 8, 17, 64, 200), ("latents", "bf16", "fp8_ds_mla")):
        inputs = draw(num_tokens, device, rows)
        out, lse = decode(*inputs, direct)
        for got, wanted in zip((out, lse), decode(*inputs, WithoutMailbox(direct)), strict=True):
            assert torch.equal(got, wanted)
        wanted, wanted_lse = decode(*inputs, a2a)
        torch.testing.assert_close(out, wanted, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse, wanted_lse)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            replayed = decode(*inputs, direct)
        for _ in range(3):
            graph.replay()
            decode(*inputs, direct)
            assert torch.equal(replayed[0], out)
    direct.check()


@on_gpus(2, 4)
def test_rows_that_attention_sends(num_gpus: int) -> None:
    run_ranks(num_gpus, check_rows, device="cuda")
