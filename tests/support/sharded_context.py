"""Prefill over a context that is sharded over simulated ranks, against float64."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dcpmla import DCPConfig, StepMetadata, dcp_mla_prefill
from dcpmla.attention.mla.prefill import read_cache_rows
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.formats import write_latents
from dcpmla.cache.latent import num_blocks
from dcpmla.comm.exchange import LocalExchange
from tests.attention.test_reference import SCALE, L, P, R, V, attend_heads, check_close
from tests.support.backends import up
from tests.test_ownership import deal_slots


class AllRanks(LocalExchange):
    """The exchange of a group whose ranks are all here: it gathers context from all caches, chunk by chunk."""

    name = "all ranks"

    def __init__(self, caches: Sequence[Tensor], steps: Sequence[StepMetadata]) -> None:
        chunks = [step.prefill.context_chunks for step in steps if step.prefill is not None]
        self.chunks: Iterator[list[Tensor]] = (
            [read_cache_rows(cache, piece.local_slots) for cache, piece in zip(caches, pieces, strict=True)]
            for pieces in zip(*chunks, strict=True)
        )

    def start_context(self, rows: Tensor, order: Tensor, tokens: Tensor) -> Callable[[], Tensor]:
        gathered = [part.view(torch.uint8) for part in next(self.chunks)]
        assert any(torch.equal(rows.view(torch.uint8), part) for part in gathered)
        return lambda: torch.cat(gathered)[order].view(rows.dtype)


def naive_context_prefill(
    q: Tensor,
    latents: Sequence[Tensor],
    w_kv_b: Tensor,
    query_lens: Sequence[int],
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend in float64, keys and values up-projected head by head.

    Args:
        latents: Latents [S, L + R] of each sequence.
        positions: Positions [T, k] that the tokens select, -1 after them; None for all up to each token.
    """
    lens = list(query_lens)
    selected = iter(() if positions is None else positions)
    outs, lses = [], []
    for queries, sequence in zip(q.split(lens), latents, strict=True):
        kv_c, k_pe = sequence.double().split([L, R], -1)
        keys = torch.stack([torch.cat([kv_c @ head[:P].T, k_pe], -1) for head in w_kv_b.double()], 1)
        values = torch.stack([kv_c @ head[P:].T for head in w_kv_b.double()], 1)
        for query, num_visible in zip(queries, range(len(sequence) - len(queries) + 1, len(sequence) + 1), strict=True):
            row = torch.arange(num_visible) if positions is None else next(selected)
            chosen = row[row >= 0].long()
            out, lse = attend_heads(query, keys[chosen], values[chosen], SCALE)
            outs.append(out)
            lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


class ShardedContext:
    """Requests of a prefill whose cached context is sharded over simulated ranks, two heads, random numbers."""

    def __init__(self, dcp: DCPConfig, query_lens: Sequence[int], context_lens: Sequence[int]) -> None:
        self.query_lens, size = query_lens, dcp.decode_context_parallel_size
        seq_lens = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
        blocks = itertools.count()
        tables = [[next(blocks) for _ in range(num_blocks(length, dcp))][::-1] for length in seq_lens]
        generator = torch.Generator().manual_seed(0)
        self.latents = [torch.randn(seq_len, L + R, generator=generator) for seq_len in seq_lens]
        self.caches = [torch.full((next(blocks), dcp.block_size, L + R), torch.nan) for _ in range(size)]
        for sequence, context_len, table in zip(self.latents, context_lens, tables, strict=True):
            slots = deal_slots(context_len, table, dcp.block_size, size, dcp.cp_kv_cache_interleave_size)
            for row, (rank, slot) in zip(sequence[:context_len], slots, strict=True):
                write_latents(self.caches[rank], row[None, :L], row[None, L:], torch.tensor([slot]))
        self.q = torch.randn(sum(query_lens), 2, P + R, generator=generator)
        self.w_kv_b = torch.randn(2, P + V, L, generator=generator)
        requests = StepRequests(query_lens, seq_lens, tables)
        self.steps = [StepBuilder(dcp, rank).build(requests) for rank in range(size)]

    def check(self, min_chunks: int = 0, positions: Tensor | None = None) -> None:
        """Compare each rank's prefill with float64 over whole sequences, or over positions that the tokens select."""
        new = torch.cat([rows[len(rows) - query :] for rows, query in zip(self.latents, self.query_lens, strict=True)])
        expected = naive_context_prefill(self.q, self.latents, self.w_kv_b, self.query_lens, positions)
        for cache, step in zip(self.caches, self.steps, strict=True):
            assert len(step.prefill.context_chunks) >= min_chunks
            rows, exchange = (self.q, new[:, :L], new[:, L:], cache), AllRanks(self.caches, self.steps)
            got = dcp_mla_prefill(*rows, up(self.w_kv_b), step.prefill, SCALE, exchange, selected_positions=positions)
            check_close(got, expected, torch.float32, atol=1e-4, rtol=0.0)
