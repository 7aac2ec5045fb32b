"""Rows of real caches of all kinds, moved between ranks of two jobs: the bytes that loops over rows expect."""

from collections.abc import Sequence
from random import Random

import pytest
import torch
from torch import Tensor

from dcpmla.attention.stack import Stack
from dcpmla.cache.items import Items
from dcpmla.cache.layers import Cache
from dcpmla.config import DCPConfig
from dcpmla.integrations.families.table import attention_of
from dcpmla.transfer.layout import CacheLayout, describe
from dcpmla.transfer.parts import RowMover
from dcpmla.transfer.route import Route
from tests.support.layouts import dcp_config
from tests.support.models import FAMILIES, tiny_config

BLOCKS_HERE, BLOCKS_THERE = [7, 2, 5, 0, 1, 3, 4, 6], [4, 3, 9, 1, 0, 2, 6, 5, 8, 7]
STATE_HERE, STATE_THERE = 1, 3
# Other families have caches of the same kinds.
OF_KINDS = {"deepseek_v3", "glm_moe_dsa", "mistral_large4_text", "dots3_note_text"}
OF_KINDS |= {"deepseek_v4", "kimi_k3", "glm5_next_text"}
LAYOUTS = [(2, 2, 1, 4, 4, 16), (2, 1, 1, 4, 2, 4), (4, 4, 4, 2, 1, 1), (1, 1, 1, 2, 2, 16)]


class Job:
    """The caches of all ranks of a job, with random bytes."""

    def __init__(self, kind: Stack, dcp: DCPConfig, num_blocks: int, num_drafts: int) -> None:
        tokens = kind.plan_cache(dcp, [1], torch.bfloat16, num_states=4).block_tokens * num_blocks
        plan = kind.plan_cache(dcp, [tokens], torch.bfloat16, num_states=4, num_drafts=num_drafts)
        self.caches: list[Cache] = [plan.allocate(torch.device("cpu")) for _ in range(dcp.tensor_parallel_size)]
        for cache in self.caches:
            for tensor in cache.tensors:
                tensor.view(torch.uint8).random_()
        self.layout = describe(self.caches[0], dcp)
        self.movers = [RowMover(cache, self.layout) for cache in self.caches]

    def token_row(self, rank: int, tensor: int, row: int, blocks: Sequence[int]) -> bytes | None:
        """Return a row of a sequence on a rank; None if another rank owns it."""
        cache, layout, spec = self.caches[rank], self.layout, self.layout.tokens[tensor]
        if not spec.is_shared:
            owner, dcp_rank = row // layout.interleave % layout.dcp_size, rank % layout.dcp_size
            if owner != dcp_rank:
                return None
            row = row // (layout.interleave * layout.dcp_size) * layout.interleave + row % layout.interleave
        items = [each.rows for rows in [cache.shared_rows, *cache.token_rows] for each in rows][tensor]
        return item(items, blocks[row // spec.per_block] * spec.per_block + row % spec.per_block)

    def state_row(self, rank: int, tensor: int, position: int, state: int) -> bytes:
        """Return the row of a position in a state."""
        num_rows = self.layout.states[tensor].num_rows
        return item(self.caches[rank].state_rows[tensor].rows, state * num_rows + position % num_rows)


def item(items: Items, number: int) -> bytes:
    page, row = divmod(items.first_row + number, items.pages.shape[1])
    return items.pages[page, row].contiguous().view(torch.uint8).numpy().tobytes()


def kinds(family: str) -> Stack:
    config = tiny_config(family)
    if family == "deepseek_v4":
        config.head_dim = 128  # this width has a format in 8 bits
    return attention_of(config)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family in OF_KINDS])
def test_all_rows_of_a_sequence_move(family: str, sizes: tuple[int, ...]) -> None:
    """In three ranges and small parts; nothing else changes."""
    tp, dcp, interleave, tp_there, dcp_there, interleave_there = sizes
    formats = {"index_cache_dtype": "fp8"} if tp == 4 else {}
    if tp == 4 and family.startswith("deepseek_v4"):
        formats["kv_cache_dtype"] = "fp8_ds_mla"
    kind = kinds(family)
    here = Job(kind, dcp_config(tp, dcp, interleave, block_size=16, **formats), 8, 0)
    there = Job(kind, dcp_config(tp_there, dcp_there, interleave_there, block_size=64, **formats), 10, 2)
    here.layout.check_matches(there.layout)
    longest = min(6 * here.caches[0].sizes.block_tokens, 7 * there.caches[0].sizes.block_tokens)
    start, middle, end = sorted(Random(0).sample(range(longest), 3))
    slot_bytes = max(2048, *(spec.row_bytes for spec in (*here.layout.tokens, *here.layout.states)))
    unchanged = [[tensor.clone() for tensor in cache.tensors] for cache in there.caches]
    for target in range(tp_there):
        for source in range(tp):
            route = Route(here.layout, source, there.layout, target)
            parts = [*route.parts(start, middle, slot_bytes), *route.parts(middle, end, slot_bytes)]
            for part in [*parts, *route.state_parts(end, slot_bytes)]:
                content = torch.full([part.num_bytes], 171, dtype=torch.uint8)
                here.movers[source].gather(part, BLOCKS_HERE, STATE_HERE, content)
                there.movers[target].scatter(part, BLOCKS_THERE, STATE_THERE, content)
    check_tokens(here, there, start, end)
    check_states(here, there, end)
    for rank, cache in enumerate(there.caches):  # the rows that moved are put back
        restore(cache, there.layout, rank, unchanged[rank], start, end)
        for tensor, before in zip(cache.tensors, unchanged[rank], strict=True):
            assert tensor.view(torch.uint8).equal(before.view(torch.uint8))


def check_tokens(here: Job, there: Job, start: int, end: int) -> None:
    num_replicas = here.layout.tp_size // here.layout.dcp_size
    for tensor, spec in enumerate(here.layout.tokens):
        for target in range(there.layout.tp_size):
            for row in range(start // spec.span, end // spec.span):
                content = there.token_row(target, tensor, row, BLOCKS_THERE)
                if content is None:
                    continue
                source = target * here.layout.tp_size // there.layout.tp_size
                if not spec.is_shared:
                    source = row // here.layout.interleave % here.layout.dcp_size
                    source += here.layout.dcp_size * (target * num_replicas // there.layout.tp_size)
                assert content == here.token_row(source, tensor, row, BLOCKS_HERE), (spec, target, row)


def check_states(here: Job, there: Job, end: int) -> None:
    """Compare whole rows: the columns of all ranks, group by group."""
    for tensor, spec in enumerate(here.layout.states):
        for position in range(max(0, end - spec.num_last), end):
            if not spec.num_parts:
                for target in range(there.layout.tp_size):
                    source = target * here.layout.tp_size // there.layout.tp_size
                    expected = here.state_row(source, tensor, position, STATE_HERE)
                    assert there.state_row(target, tensor, position, STATE_THERE) == expected, spec
                continue
            rows = [
                [job.state_row(rank, tensor, position, state) for rank in range(job.layout.tp_size)]
                for job, state in ((here, STATE_HERE), (there, STATE_THERE))
            ]
            wholes = [joined(of_ranks, spec.num_parts) for of_ranks in rows]
            assert wholes[0] == wholes[1], spec


def joined(rows: list[bytes], num_parts: int) -> bytes:
    width = len(rows[0]) // num_parts
    return b"".join(row[part * width : (part + 1) * width] for part in range(num_parts) for row in rows)


def restore(cache: Cache, layout: CacheLayout, rank: int, before: list[Tensor], start: int, end: int) -> None:
    """Put back the rows that were to be written, by their places in the tensors."""
    old = {tensor.data_ptr(): copy for tensor, copy in zip(cache.tensors, before, strict=True)}
    places: list[tuple[Items, list[int]]] = []
    for spec, rows in zip(layout.tokens, [e for r in [cache.shared_rows, *cache.token_rows] for e in r], strict=True):
        numbers = []
        for row in range(start // spec.span, end // spec.span):
            local = row
            if not spec.is_shared:
                if row // layout.interleave % layout.dcp_size != rank % layout.dcp_size:
                    continue
                local = row // (layout.interleave * layout.dcp_size) * layout.interleave + row % layout.interleave
            numbers.append(BLOCKS_THERE[local // spec.per_block] * spec.per_block + local % spec.per_block)
        places.append((rows.rows, numbers))
    for state in cache.state_rows:
        last = range(max(0, end - state.num_last), end)
        places.append((state.rows, [STATE_THERE * state.num_rows + p % state.num_rows for p in last]))
    for items, numbers in places:
        memory = old_view(items, old)
        for number in numbers:
            page, row = divmod(items.first_row + number, items.pages.shape[1])
            items.pages[page, row] = memory.pages[page, row]


def old_view(items: Items, old: dict[int, Tensor]) -> Items:
    """Return the same items of the copied tensor that a view belongs to."""
    address = items.pages.untyped_storage().data_ptr()
    copy = next(copy for pointer, copy in old.items() if pointer == address)
    offset = items.pages.storage_offset() * items.pages.itemsize
    flat = copy.view(-1).view(torch.uint8)[offset:]
    flat = flat[: len(flat) // items.pages.itemsize * items.pages.itemsize].view(items.pages.dtype)
    return items._replace(pages=flat.as_strided(items.pages.shape, items.pages.stride()))
