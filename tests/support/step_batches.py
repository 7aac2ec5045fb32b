"""Batches of a step, blocks drawn at random, and their context read back chunk by chunk."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from dcpmla import DCPConfig, StepMetadata
from dcpmla.attention.step.chunks import ContextChunk, PrefillMetadata
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from tests.support.layouts import dcp_config
from tests.test_ownership import deal_slots

Mark = tuple[int, int]  # (request, position)


@dataclass
class Batch:
    query_lens: list[int]
    seq_lens: list[int]
    block_tables: list[list[int]]
    dcp: DCPConfig
    max_decode_query_len: int = 1
    num_absorbed: int | None = None

    @property
    def size(self) -> int:
        return self.dcp.decode_context_parallel_size

    @property
    def interleave(self) -> int:
        return self.dcp.cp_kv_cache_interleave_size

    @property
    def context_lens(self) -> list[int]:
        return [seq - query for query, seq in zip(self.query_lens, self.seq_lens, strict=True)]

    @property
    def num_decodes(self) -> int:
        """Count the decodes: requests before the first one with too many new tokens."""
        if self.num_absorbed is not None:
            return self.num_absorbed
        count = 0
        while count < len(self.query_lens) and self.query_lens[count] <= self.max_decode_query_len:
            count += 1
        return count

    def owners(self, request: int) -> list[tuple[int, int]]:
        """(rank, slot) of each token of a request."""
        return deal_slots(
            self.seq_lens[request], self.block_tables[request], self.dcp.block_size, self.size, self.interleave
        )

    def build(self) -> list[StepMetadata]:
        requests = StepRequests(self.query_lens, self.seq_lens, self.block_tables)
        return [
            StepBuilder(self.dcp, rank).build(requests, self.max_decode_query_len, self.num_absorbed)
            for rank in range(self.size)
        ]


def make_batch(
    requests: Sequence[tuple[int, int]],
    size: int,
    interleave: int,
    block_size: int,
    workspace: int | None = None,
    seed: int = 0,
) -> Batch:
    """Check requests (new tokens, cached tokens), blocks drawn at random; a workspace of one aligned chunk a request
    unless given.
    """
    dcp = dcp_config(size, size, interleave, block_size=block_size)
    dcp = replace(dcp, context_workspace_tokens=workspace or dcp.chunk_alignment * max(1, len(requests)))
    counts = [len(range(0, query + context, block_size * size)) for query, context in requests]
    ids = iter(random.Random(seed).sample(range(sum(counts) + 5), sum(counts)))
    tables = [[next(ids) for _ in range(count)] for count in counts]
    return Batch([query for query, _ in requests], [query + context for query, context in requests], tables, dcp)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    size, interleave = draw(st.integers(1, 8)), draw(st.sampled_from([1, 2, 16]))
    block_size = interleave * draw(st.sampled_from([1, 2, 3]))
    alignment = block_size * size  # a multiple of the chunk alignment, large enough to scale lengths by
    queries = st.one_of(st.just(1), st.integers(1, 9), st.integers(1, 2 * alignment))
    contexts = st.one_of(st.just(0), st.integers(0, size), st.integers(0, 4 * alignment), st.just(2 * alignment))
    requests = draw(st.lists(st.tuples(queries, contexts), min_size=1, max_size=5))
    requests = draw(st.permutations(requests)) if draw(st.booleans()) else sorted(requests)
    batch = make_batch(requests, size, interleave, block_size, seed=draw(st.integers(0, 99)))
    batch.max_decode_query_len = draw(st.sampled_from([1, 1, 2, 5]))
    batch.num_absorbed = draw(st.one_of(st.none(), st.integers(0, len(requests))))
    workspace = batch.dcp.chunk_alignment + draw(st.integers(0, 12 * batch.dcp.chunk_alignment))
    batch.dcp = replace(batch.dcp, context_workspace_tokens=workspace)
    return batch


def read_caches(batch: Batch) -> list[dict[int, Mark]]:
    """Slot -> mark of each rank's cache with all cached context in it. A slot without a mark was never written."""
    caches: list[dict[int, Mark]] = [{} for _ in range(batch.size)]
    for request, context_len in enumerate(batch.context_lens):
        for position, (rank, slot) in enumerate(batch.owners(request)[:context_len]):
            assert slot not in caches[rank]
            caches[rank][slot] = request, position
    return caches


def gather_chunks(batch: Batch, prefills: list[PrefillMetadata]) -> list[list[list[Mark | None]]]:
    """Return what the exchange brings, chunk by chunk: the marks of each prefill request's tokens in order."""
    caches = read_caches(batch)
    chunks = []
    for pieces in zip(*(prefill.context_chunks for prefill in prefills), strict=True):
        rows = [caches[rank].get(slot) for rank, piece in enumerate(pieces) for slot in piece.local_slots.tolist()]
        tokens = [rows[index] for index in pieces[0].order.tolist()]
        start = pieces[0].keys.start
        chunks.append([tokens[start[i] : start[i + 1]] for i in range(len(start) - 1)])
    return chunks


def check_chunks(batch: Batch, steps: list[StepMetadata]) -> None:
    prefills = [step.prefill for step in steps if step.prefill is not None]
    requests = range(batch.num_decodes, len(batch.query_lens))
    assert len(prefills) == (batch.size if requests else 0)
    if not prefills:
        return
    check_ranks_agree(batch, prefills)
    done = dict.fromkeys(requests, 0)
    for chunk in gather_chunks(batch, prefills):
        assert sum(len(tokens) for tokens in chunk) > 0
        for request, tokens in zip(requests, chunk, strict=True):
            assert tokens == [(request, done[request] + index) for index in range(len(tokens))]
            done[request] += len(tokens)
    assert done == {request: batch.context_lens[request] for request in requests}
    alignment = batch.dcp.chunk_alignment
    needed, room = (-(-done[request] // alignment) for request in requests), batch.dcp.context_workspace_tokens
    assert len(prefills[0].context_chunks) == -(-sum(needed) // (room // alignment))  # the room is used


def check_ranks_agree(batch: Batch, prefills: list[PrefillMetadata]) -> None:
    """Check that every rank takes part in the same exchanges with the same shapes, within the workspace."""
    num_slots = (max(max(table) for table in batch.block_tables) + 1) * batch.dcp.block_size
    assert len({len(prefill.context_chunks) for prefill in prefills}) == 1
    for pieces in zip(*(prefill.context_chunks for prefill in prefills), strict=True):
        first = pieces[0]
        assert all(piece.keys.start == first.keys.start and torch.equal(piece.order, first.order) for piece in pieces)
        assert {(tuple(piece.local_slots.shape), piece.local_slots.dtype) for piece in pieces} == {
            (first.local_slots.shape, torch.int64)
        }
        assert {piece.tokens.dtype for piece in pieces} == {first.order.dtype} == {torch.int64}
        check_tokens_of_rows(pieces)
        assert first.keys.start[0] == 0
        assert len(first.order) == first.keys.start[-1] <= batch.dcp.context_workspace_tokens
        # Padding has room in it as well.
        assert batch.size * len(first.local_slots) <= batch.dcp.context_workspace_tokens
        assert all(0 <= slot < num_slots for piece in pieces for slot in piece.local_slots.tolist())


def check_tokens_of_rows(pieces: Sequence[ContextChunk]) -> None:
    """Each rank's tokens of rows are `order`, read the other way: every token has one row, all others are padding."""
    tokens = [token for piece in pieces for token in piece.tokens.tolist()]
    order = pieces[0].order.tolist()
    assert len(tokens) == len(pieces) * len(pieces[0].local_slots)
    assert [tokens[row] for row in order] == list(range(len(order)))
    assert tokens.count(-1) == len(tokens) - len(order)
