"""Tables of steps on the CPU, padded to any sizes: drawn ones, and the numbers of their tokens in plain Python."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from dcpmla.attention.step.metadata import StepMetadata, lay_out
from dcpmla.attention.step.table import StepLayout, StepRequests, StepTable, StepTokens, StepTraits, TableSizes
from dcpmla.runtime.graph_sizes import GraphLimits
from tests.support.layouts import dcp_config
from tests.test_ownership import deal_slots

Row = tuple[int, int, bool] | None  # request, position, whether the row does not repeat another; None in padding


@dataclass
class TableCase:
    """A step, and the sizes that its tables are padded to.

    Attributes:
        requests, sizes: Arguments of `StepTable.fill`.
        rejected: Positions that each request is moved back by.
        layout: Layout of the cache of one rank.
    """

    requests: StepRequests
    sizes: TableSizes
    rejected: list[int]
    layout: StepLayout

    def fill(self) -> StepTable:
        """Return the table, its bounds of requests not written yet."""
        table = fill_table(self.requests, self.sizes)
        table.begin.fill_(-9)
        table.end.fill_(-9)
        table.num_rejected[: len(self.rejected)] = torch.tensor(self.rejected)
        return table

    @property
    def decodes(self) -> list[int]:
        """New tokens of each decode."""
        return list(self.requests.query_lens[: self.requests.num_decodes])

    @property
    def num_absorbed(self) -> int:
        return sum(self.decodes)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Positions of each request's new tokens, moved back."""
        numbers = zip(self.requests.query_lens, self.requests.seq_lens, self.rejected, strict=True)
        return [(seq - new - back, seq - back) for new, seq, back in numbers]

    @property
    def rows(self) -> list[Row]:
        rows: list[Row] = []
        for request, (begin, end) in enumerate(self.bounds):
            rows += [(request, position, True) for position in range(begin, end)]
            if self.sizes.query_len:
                rows += [(request, end - 1, False)] * (self.sizes.query_len - (end - begin))
        return rows + [None] * (self.sizes.num_tokens - len(rows))

    def expected(self) -> list[list[int]]:
        """Return the columns of `StepTokens`, from tokens that are dealt to ranks one by one."""
        owner, query_len, block_tokens = self.layout.owner, self.sizes.query_len, self.layout.block_tokens
        dealt = [
            deal_slots(end, list(blocks), block_tokens // owner.size, owner.size, owner.interleave)
            for (_, end), blocks in zip(self.bounds, self.requests.block_tables, strict=True)
        ]
        attending = self.num_absorbed if self.sizes.room and not query_len else self.sizes.num_tokens
        columns: list[list[int]] = [[], [], [], [], []]
        for index, row in enumerate(self.rows):
            # In a step of decodes the requests of padding have rows, too.
            numbers = [index // query_len if query_len else 0, 0, 0, 0, -1]
            if row is not None:
                request, position, is_new = row
                seen = dealt[request][: position + 1]
                rank, slot = seen[-1]
                local = sum(each == owner.rank for each, _ in seen) if index < attending else 0
                is_written = self.layout.traits.has_slots and is_new and rank == owner.rank
                numbers = [request, position + 1, local, position, slot if is_written else -1]
            for column, number in zip(columns, numbers, strict=True):
                column.append(number)
        return columns


def fill_table(requests: StepRequests, sizes: TableSizes) -> StepTable:
    """Return the numbers of a step's requests (`StepTable.fill`), with their block ids and zeros after them."""
    words = np.zeros(sizes.num_words, dtype=np.int32)
    blocks = np.zeros((sizes.num_reqs, max([1, *map(len, requests.block_tables)])), dtype=np.int32)
    for row, ids in zip(blocks, requests.block_tables, strict=False):
        row[: len(ids)] = ids
    StepTable.of(words, sizes, blocks).fill(requests, sizes)
    return StepTable.of(torch.from_numpy(words), sizes, torch.from_numpy(blocks))


def lay_out_step(table: StepTable, sizes: TableSizes, layout: StepLayout) -> StepMetadata:
    """Return the step of a table with the numbers of its tokens, as layers of linear attention or hashes read it."""
    tokens = StepTokens.empty(sizes.num_tokens, "cpu")
    lay_out(table, tokens, layout)
    longest = int(tokens.seq_lens.max())
    return StepMetadata(layout, table, tokens, sizes.num_tokens, 0, 0, 0, longest)


@st.composite
def layouts(draw: st.DrawFn) -> StepLayout:
    size, interleave = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 8]))
    dcp = dcp_config(size, size, interleave, block_size=interleave * draw(st.integers(1, 3)))
    has_slots = draw(st.booleans())
    block_tokens = None if has_slots else dcp.virtual_block_size * draw(st.integers(1, 4))
    owner = dcp.owner(draw(st.integers(0, size - 1)))
    return StepLayout(dcp, owner, torch.device("cpu"), StepTraits(block_tokens=block_tokens, has_slots=has_slots))


@st.composite
def table_cases(draw: st.DrawFn) -> TableCase:
    """Draw steps without padding, steps of decodes of one width with it, and steps of any requests with it."""
    layout = draw(layouts())
    form = draw(st.sampled_from(["eager", "one token each", "decodes", "graph"]))
    longest = 1 if form == "one token each" else draw(st.sampled_from([1, 4, 70]))
    lens = draw(st.lists(st.integers(1, longest), min_size=1, max_size=8))
    back = [draw(st.integers(0, 3)) for _ in lens]
    ends = [new + num + draw(st.integers(0, 90)) for new, num in zip(lens, back, strict=True)]
    counts = [-(-end // layout.block_tokens) for end in ends]
    ids = iter(draw(st.permutations(range(sum(counts)))))
    tables = [[next(ids) for _ in range(count)] for count in counts]
    states = draw(st.sampled_from([(), [None] * len(lens), list(range(len(lens)))[::-1]]))
    has_width = form in ("one token each", "decodes")
    num_decodes, segment_len = len(lens) if has_width else draw(st.integers(0, len(lens))), draw(st.integers(1, 8))
    requests = StepRequests(lens, ends, tables, states, num_decodes, segment_len)
    num_reqs = len(lens) + draw(st.sampled_from([0, 1, 3]))
    if has_width:
        query_len = max(lens) + (draw(st.integers(0, 2)) if form == "decodes" else 0)
        sizes = TableSizes(num_reqs, num_reqs * query_len, 0, query_len, room=num_reqs * query_len)
        return TableCase(requests, sizes, back, layout)
    num_absorbed, num_tokens = sum(lens[:num_decodes]), sum(lens)
    if form == "eager":
        num_segments = sum(-(-length // segment_len) for length in lens[:num_decodes])
        sizes = TableSizes(len(lens), num_tokens, num_segments)
        return TableCase(requests, sizes, back, layout)
    num_tokens += draw(st.integers(0, 140))
    num_reqs += draw(st.sampled_from([0, 200]))  # a step may have more requests than tokens
    room = draw(st.integers(num_absorbed, num_tokens))
    limits = GraphLimits(num_reqs, 10**6, segment_len, num_absorbed_tokens=room)
    sizes = TableSizes(num_reqs, num_tokens, limits.num_segments if room else 0, room=room)
    return TableCase(requests, sizes, back, layout)
