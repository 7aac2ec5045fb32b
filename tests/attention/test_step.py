"""A step's layout against caches played out in Python: every rank's slots are marked with (request, position), then
read back.
"""

import itertools

import pytest
import torch
from hypothesis import example, given

from dcpmla import DCPConfig, StepMetadata
from dcpmla.attention.step.chunks import lay_out_prefills
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import pad_table
from tests.support.step_batches import Batch, batches, check_chunks, make_batch


def check_tokens(batch: Batch, steps: list[StepMetadata]) -> None:
    """Check the new tokens, request after request, and the table that they come from."""
    first, ends = batch.context_lens, batch.seq_lens
    rows = [(request, position) for request, end in enumerate(ends) for position in range(first[request], end)]
    request, positions = (list(column) for column in zip(*rows, strict=True))
    owners = [batch.owners(index) for index in range(len(ends))]
    dealt = [owners[index][position] for index, position in rows]
    for rank, step in enumerate(steps):
        assert step.num_tokens == sum(batch.query_lens) == len(rows)
        assert step.num_decode_tokens == sum(batch.query_lens[: batch.num_decodes])
        assert step.num_blocks == max(map(max, batch.block_tables)) + 1
        tokens, table, owner = step.tokens, step.table, batch.dcp.owner(rank)
        assert [column.dtype for column in tokens] == [*[torch.int32] * 3, *[torch.int64] * 2]
        assert tokens.request.tolist() == request
        assert tokens.positions.tolist() == positions
        assert tokens.seq_lens.tolist() == [position + 1 for position in positions]
        assert tokens.local_seq_lens.tolist() == [
            sum(each == rank for each, _ in owners[index][: position + 1]) for index, position in rows
        ]
        assert tokens.slots.tolist() == [slot if each == rank else -1 for each, slot in dealt]
        of_tokens = table.block_table[tokens.request]
        assert torch.equal(tokens.slots, owner.slot_mapping(tokens.positions, of_tokens, batch.dcp.block_size))
        assert table.begin.tolist() == table.first_position.tolist() == first
        assert table.end.tolist() == ends
        assert table.num_tokens.tolist() == batch.query_lens
        assert table.row_start.tolist() == [0, *itertools.accumulate(batch.query_lens)]
        assert all(column.data_ptr() % 16 == 0 for column in table)  # kernels are compiled for this


def check_decodes(batch: Batch, steps: list[StepMetadata]) -> None:
    for step in steps:
        assert (step.decode is None) == (batch.num_decodes == 0)
        if step.decode is None:
            continue
        assert step.decode.block_table.dtype == step.decode.local_seq_lens.dtype == torch.int32
        assert torch.equal(step.decode.local_seq_lens, step.tokens.local_seq_lens[: step.num_decode_tokens])
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
        starts = [0, *itertools.accumulate(queries)]
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
    for step in steps:
        if step.prefill is not None:
            prefill = lay_out_prefills(step.layout, *requests, wider[first:])
            for chunk, expected in zip(prefill.context_chunks, step.prefill.context_chunks, strict=True):
                assert chunk.local_slots.dtype == torch.int64
                assert torch.equal(chunk.local_slots, expected.local_slots)


def check(batch: Batch) -> None:
    steps = batch.build()
    check_tokens(batch, steps)
    check_decodes(batch, steps)
    check_prefills(batch, steps)
    check_chunks(batch, steps)
    check_tables_of_engines(batch, steps)


# Shapes that broke others.
@example(make_batch([(5, 7)], 8, 1, 4, 8))  # context shorter than W: one rank owns nothing
@example(make_batch([(3, 1), (4, 0), (2, 200)], 4, 2, 4, 87))  # the short context leaves its room to the long one
@example(make_batch([(2, 63), (2, 64), (2, 65)], 2, 16, 32, 192))  # contexts around one chunk
@example(make_batch([(2, 16)] * 7 + [(2, 900)], 2, 1, 8, 256))  # one long context among many short ones
@example(make_batch([(2, 40)] * 5, 2, 1, 8, 32))  # more contexts than aligned chunks in the workspace
@example(make_batch([(9, 700)], 3, 16, 32, 100))  # lcm(32, 3 x 16) = 96, W not a power of two
@example(make_batch([(9, 700)], 5, 2, 6, 30))  # lcm(6, 5 x 2) = 30, block size not a power of two
@example(make_batch([(1, 30), (1, 2), (6, 50), (1, 17)], 4, 1, 4, 24))  # a prefill of one token after a longer one
@example(make_batch([(5, 0), (3, 0)], 4, 1, 4, 4))  # no context at all
@example(make_batch([(1, 0), (1, 9)], 4, 1, 4, 4))  # decodes alone, one without context
@given(batch=batches())
def test_any_batch(batch: Batch) -> None:
    check(batch)


@pytest.mark.gpu
def test_layout_on_the_device_waits_for_nothing() -> None:
    """A step's prefills are laid out while the device works: no copy to the host, and none that waits."""
    table = torch.arange(2 * 8, dtype=torch.int32, device="cuda").view(2, 8)
    builder = StepBuilder(DCPConfig(tensor_parallel_size=2, decode_context_parallel_size=2, block_size=16), 1, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        (chunk,) = lay_out_prefills(builder.layout, [3, 9], [100, 240], table).context_chunks
    finally:
        torch.cuda.set_sync_debug_mode("default")
    layout = StepBuilder(builder.layout.dcp, 1, "cpu").layout
    on_host = lay_out_prefills(layout, [3, 9], [100, 240], table.cpu()).context_chunks[0]
    for name in ("local_slots", "order", "tokens", "first_position"):
        assert getattr(chunk, name).tolist() == getattr(on_host, name).tolist()


def test_block_tables_may_be_longer_than_needed() -> None:
    batch = make_batch([(1, 20), (4, 40)], 4, 1, 4)
    longer = Batch(batch.query_lens, batch.seq_lens, [table + [-1, 99, 0] for table in batch.block_tables], batch.dcp)
    for step, other in zip(batch.build(), longer.build(), strict=True):
        assert torch.equal(step.tokens.slots, other.tokens.slots)
        assert torch.equal(step.decode.block_table, other.decode.block_table)
    check_chunks(longer, longer.build())
