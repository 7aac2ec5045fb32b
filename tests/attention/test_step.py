"""A step's layout against caches played out in Python: every rank's slots are marked with (request, position), then
read back.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpmla import DCPConfig, StepMetadata
from dcpmla.attention.build import StepBuilder
from dcpmla.attention.chunks import context_workspace_tokens, pad_table
from dcpmla.attention.step import ContextChunk, PrefillMetadata, StepRequests
from tests.test_ownership import deal, deal_slots

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
        """Return how many decodes come first: of few new tokens each, up to the first request with more."""
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
    dcp = DCPConfig(
        tensor_parallel_size=size,
        decode_context_parallel_size=size,
        cp_kv_cache_interleave_size=interleave,
        block_size=block_size,
    )
    dcp = DCPConfig(
        **{**vars(dcp), "context_workspace_tokens": workspace or dcp.chunk_alignment * max(1, len(requests))}
    )
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
    batch.dcp = DCPConfig(**{**vars(batch.dcp), "context_workspace_tokens": workspace})
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
    """Every rank takes part in the same exchanges with the same shapes, and none of them exceeds the workspace."""
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
        assert (
            batch.size * len(first.local_slots) <= batch.dcp.context_workspace_tokens
        )  # padding has room in it as well
        assert all(0 <= slot < num_slots for piece in pieces for slot in piece.local_slots.tolist())


def check_tokens_of_rows(pieces: Sequence[ContextChunk]) -> None:
    """Each rank's tokens of rows are `order`, read the other way: every token has one row, all others are padding."""
    tokens = [token for piece in pieces for token in piece.tokens.tolist()]
    order = pieces[0].order.tolist()
    assert len(tokens) == len(pieces) * len(pieces[0].local_slots)
    assert [tokens[row] for row in order] == list(range(len(order)))
    assert tokens.count(-1) == len(tokens) - len(order)


def check_tokens(batch: Batch, steps: list[StepMetadata]) -> None:
    """Positions and slots of the new tokens, request after request."""
    expected = [
        (position, *owner)
        for request, context_len in enumerate(batch.context_lens)
        for position, owner in list(enumerate(batch.owners(request)))[context_len:]
    ]
    for rank, step in enumerate(steps):
        assert step.num_tokens == sum(batch.query_lens) == len(expected)
        assert step.num_decode_tokens == sum(batch.query_lens[: batch.num_decodes])
        assert step.num_blocks == max(map(max, batch.block_tables)) + 1
        assert step.positions.dtype == step.slot_mapping.dtype == torch.int64
        assert step.positions.tolist() == [position for position, _, _ in expected]
        assert step.slot_mapping.tolist() == [slot if owner == rank else -1 for _, owner, slot in expected]


def check_decodes(batch: Batch, steps: list[StepMetadata]) -> None:
    for rank, step in enumerate(steps):
        assert (step.decode is None) == (batch.num_decodes == 0)
        if step.decode is None:
            continue
        assert step.decode.block_table.dtype == step.decode.local_seq_lens.dtype == torch.int32
        seen = [
            sum(owner == rank for owner, _ in batch.owners(request)[: position + 1])
            for request in range(batch.num_decodes)
            for position in range(batch.context_lens[request], batch.seq_lens[request])
        ]
        assert step.decode.local_seq_lens.tolist() == seen
        width = batch.max_decode_query_len
        pieces = [
            (request, min(width, new - first))
            for request, new in enumerate(batch.query_lens[: batch.num_decodes])
            for first in range(0, new, width)
        ]
        index, queries = [request for request, _ in pieces], [new for _, new in pieces]
        is_cut = len(pieces) > batch.num_decodes
        assert (step.decode.request_index is not None) == is_cut
        if step.decode.request_index is not None:
            assert step.decode.request_index.dtype == torch.int32
            assert step.decode.request_index.tolist() == index
        assert step.decode.max_query_len == max(queries)
        starts = [sum(queries[:request]) for request in range(len(queries) + 1)]
        start_loc = step.decode.query_start_loc
        assert (start_loc is None) == (len(set(queries)) == 1)
        assert start_loc is None or (start_loc.dtype == torch.int32 and start_loc.tolist() == starts)
        tables = batch.block_tables[: batch.num_decodes]
        assert step.decode.block_table.shape == (batch.num_decodes, max(map(len, tables)))
        for row, table in zip(step.decode.block_table.tolist(), tables, strict=True):
            assert row[: len(table)] == table
            assert all(block in range(0, 1000) for block in row)


def check_prefills(batch: Batch, steps: list[StepMetadata]) -> None:
    queries = batch.query_lens[batch.num_decodes :]
    for step in steps:
        if step.prefill is not None:
            starts = step.prefill.queries.start
            assert [end - start for start, end in zip(starts, starts[1:], strict=False)] == queries
            assert starts[0] == 0


def check_tables_of_engines(batch: Batch, steps: list[StepMetadata]) -> None:
    """Compare with what comes of an engine's own table, int32 and a part of a wider one."""
    first = batch.num_decodes
    requests = batch.query_lens[first:], batch.seq_lens[first:]
    table = torch.from_numpy(pad_table(batch.block_tables, batch.seq_lens, batch.dcp.virtual_block_size))
    wider = torch.cat([table, torch.full_like(table, -7)], 1).to(torch.int32)[:, : table.shape[1]]
    for rank, step in enumerate(steps):
        if step.prefill is not None:
            prefill = StepBuilder(batch.dcp, rank, "cpu").prefill(*requests, wider[first:])
            for chunk, expected in zip(prefill.context_chunks, step.prefill.context_chunks, strict=True):
                assert chunk.local_slots.dtype == torch.int64
                assert torch.equal(chunk.local_slots, expected.local_slots)


def check(batch: Batch) -> list[StepMetadata]:
    steps = batch.build()
    check_tokens(batch, steps)
    check_decodes(batch, steps)
    check_prefills(batch, steps)
    check_chunks(batch, steps)
    check_tables_of_engines(batch, steps)
    return steps


@settings(max_examples=150, deadline=None)
@given(batch=batches())
def test_any_batch(batch: Batch) -> None:
    check(batch)


@pytest.mark.parametrize(
    ("requests", "layout", "workspace", "num_chunks"),
    [
        pytest.param([(5, 7)], (8, 1, 4), 8, 1, id="context shorter than W: one rank owns nothing"),
        pytest.param(
            [(3, 1), (4, 0), (2, 200)],
            (4, 2, 4),
            87,
            3,
            id="uneven contexts: the short one leaves its room to the long one",
        ),
        pytest.param([(2, 63), (2, 64), (2, 65)], (2, 16, 32), 192, 2, id="contexts around one chunk"),
        pytest.param([(2, 16)] * 7 + [(2, 900)], (2, 1, 8), 256, 4, id="one long context among many short ones"),
        pytest.param([(2, 40)] * 5, (2, 1, 8), 32, 7, id="more contexts than aligned chunks in the workspace"),
        pytest.param([(9, 700)], (3, 16, 32), 100, 8, id="lcm(32, 3 x 16) = 96, W not a power of two"),
        pytest.param([(9, 700)], (5, 2, 6), 30, 24, id="lcm(6, 5 x 2) = 30, block size not a power of two"),
        pytest.param(
            [(1, 30), (1, 2), (6, 50), (1, 17)], (4, 1, 4), 24, 3, id="a prefill of one token after a longer one"
        ),
        pytest.param([(5, 0), (3, 0)], (4, 1, 4), 4, 0, id="no context at all"),
        pytest.param([(1, 0), (1, 9)], (4, 1, 4), 4, None, id="decodes only, one without context"),
        pytest.param([(4, 100)], (1, 16, 16), 16, 7, id="one rank"),
    ],
)
def test_shapes_that_broke_others(
    requests: list[tuple[int, int]], layout: tuple[int, int, int], workspace: int, num_chunks: int | None
) -> None:
    for step in check(make_batch(requests, *layout, workspace)):
        assert (None if step.prefill is None else len(step.prefill.context_chunks)) == num_chunks


@pytest.mark.gpu
def test_layout_on_the_device_waits_for_nothing() -> None:
    """A step's prefills are laid out while the device works: no copy to the host, and none that waits."""
    table = torch.arange(2 * 8, dtype=torch.int32, device="cuda").view(2, 8)
    builder = StepBuilder(DCPConfig(tensor_parallel_size=2, decode_context_parallel_size=2, block_size=16), 1, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        (chunk,) = builder.prefill([3, 9], [100, 240], table).context_chunks
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_host = StepBuilder(builder.dcp, 1, "cpu").prefill([3, 9], [100, 240], table.cpu()).context_chunks[0]
    for name in ("local_slots", "order", "tokens", "first_position"):
        assert getattr(chunk, name).tolist() == getattr(on_host, name).tolist()


def test_block_tables_may_be_longer_than_needed() -> None:
    batch = make_batch([(1, 20), (4, 40)], 4, 1, 4)
    longer = Batch(batch.query_lens, batch.seq_lens, [table + [-1, 99, 0] for table in batch.block_tables], batch.dcp)
    for step, other in zip(batch.build(), longer.build(), strict=True):
        assert torch.equal(step.slot_mapping, other.slot_mapping)
        assert step.decode is not None
        assert other.decode is not None
        assert torch.equal(step.decode.block_table, other.decode.block_table)
    check_chunks(longer, longer.build())


def test_decode_of_many_requests_matches_the_deal() -> None:
    batch = make_batch([(1, context) for context in range(70)], 6, 2, 4)
    for rank, step in enumerate(batch.build()):
        assert step.prefill is None
        assert step.decode is not None
        lens = [sum(owner == rank for owner, _ in deal(context + 1, 6, 2)) for context in range(70)]
        assert step.decode.local_seq_lens.tolist() == lens


@settings(max_examples=60, deadline=None)
@given(
    max_model_len=st.integers(2, 200),
    max_num_seqs=st.integers(1, 6),
    size=st.integers(1, 8),
    interleave=st.sampled_from([1, 2, 16]),
    blocks=st.integers(1, 3),
)
def test_workspace_has_room_for_every_request(
    max_model_len: int, max_num_seqs: int, size: int, interleave: int, blocks: int
) -> None:
    requests = [(2, max_model_len - 2)] * max_num_seqs
    batch = make_batch(requests, size, interleave, interleave * blocks)
    workspace = context_workspace_tokens(max_model_len, max_num_seqs, batch.dcp.chunk_alignment)
    batch.dcp = DCPConfig(**{**vars(batch.dcp), "context_workspace_tokens": workspace})
    check_chunks(batch, batch.build())
