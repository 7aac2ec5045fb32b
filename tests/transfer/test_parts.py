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
from dcpmla.transfer.layout import CacheLayout, StateSpec, TokenSpec, describe
from dcpmla.transfer.parts import RowMover
from dcpmla.transfer.route import Route
from tests.support.layouts import dcp_config
from tests.support.models import FAMILIES, tiny_config
from tests.support.plain_cache import STATE, Content, PlainCache

BLOCKS_HERE, BLOCKS_THERE = (7, 2, 5, 0, 1, 3, 4, 6), (4, 3, 9, 1, 0, 2, 6, 5, 8, 7)
STATE_HERE, STATE_THERE = 1, 3
# Other families have caches of the same kinds.
OF_KINDS = {"deepseek_v3", "glm_moe_dsa", "mistral_large4_text", "dots3_note_text"}
OF_KINDS |= {"deepseek_v4", "kimi_k3", "glm5_next_text"}
LAYOUTS = [(2, 2, 1, 4, 4, 16), (2, 1, 1, 4, 2, 4), (4, 4, 4, 2, 1, 1), (1, 1, 1, 2, 2, 16)]


class Job:
    """The caches of all ranks of a job, with random bytes."""

    def __init__(self, kind: Stack, dcp: DCPConfig, num_blocks: int, num_drafts: int) -> None:
        self.dcp = dcp
        tokens = kind.plan_cache(dcp, [1], torch.bfloat16, num_states=4).block_tokens * num_blocks
        plan = kind.plan_cache(dcp, [tokens], torch.bfloat16, num_states=4, num_drafts=num_drafts)
        self.caches: list[Cache] = [plan.allocate(torch.device("cpu")) for _ in range(dcp.tensor_parallel_size)]
        for cache in self.caches:
            for tensor in cache.tensors:
                tensor.view(torch.uint8).random_()
        self.layout = describe(self.caches[0], dcp)
        self.movers = [RowMover(cache, self.layout) for cache in self.caches]

    def fill_from(self, other: "Job") -> None:
        for cache, source in zip(self.caches, other.caches, strict=True):
            for tensor, content in zip(cache.tensors, source.tensors, strict=True):
                tensor.copy_(content)

    def token_row(self, rank: int, tensor: int, row: int, blocks: Sequence[int]) -> Tensor | None:
        """Return the bytes of a row of a sequence on a rank; None if another rank owns it."""
        cache, layout, spec = self.caches[rank], self.layout, self.layout.tokens[tensor]
        if not spec.is_shared:
            owner, dcp_rank = row // layout.interleave % layout.dcp_size, rank % layout.dcp_size
            if owner != dcp_rank:
                return None
            row = row // (layout.interleave * layout.dcp_size) * layout.interleave + row % layout.interleave
        items = [each.rows for rows in [cache.shared_rows, *cache.token_rows] for each in rows][tensor]
        return item(items, blocks[row // spec.per_block] * spec.per_block + row % spec.per_block)

    def state_row(self, rank: int, tensor: int, position: int, state: int) -> Tensor:
        """Return the bytes of the row of a position in a state."""
        num_rows = self.layout.states[tensor].num_rows
        return item(self.caches[rank].state_rows[tensor].rows, state * num_rows + position % num_rows)


def item(items: Items, number: int) -> Tensor:
    page, row = divmod(items.first_row + number, items.pages.shape[1])
    return items.pages[page, row].view(torch.uint8)


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
    # States hold the inputs of up to three positions, here of fewer ones, too.
    start, middle, end = (0, 1, 2) if tp == 1 else sorted(Random(0).sample(range(longest), 3))
    slot_bytes = max(2048, *(spec.row_bytes for spec in (*here.layout.tokens, *here.layout.states)))
    expected = Job(kind, there.dcp, 10, 2)
    expected.fill_from(there)
    for target in range(tp_there):
        for source in range(tp):
            route = Route(here.layout, source, there.layout, target)
            parts = [*route.parts(start, middle, slot_bytes), *route.parts(middle, end, slot_bytes)]
            for part in [*parts, *route.state_parts(end, slot_bytes)]:
                content = torch.full([part.num_bytes], 171, dtype=torch.uint8)
                here.movers[source].gather(part, BLOCKS_HERE, STATE_HERE, content)
                there.movers[target].scatter(part, BLOCKS_THERE, STATE_THERE, content)
    copy_tokens(here, expected, start, end)
    copy_states(here, expected, end)
    for cache, own in zip(there.caches, expected.caches, strict=True):
        for tensor, content in zip(cache.tensors, own.tensors, strict=True):
            assert tensor.view(torch.uint8).equal(content.view(torch.uint8))


def copy_tokens(here: Job, there: Job, start: int, end: int) -> None:
    """Copy rows one by one, to each rank that owns them, from the nearest one that has them."""
    num_replicas = here.layout.tp_size // here.layout.dcp_size
    for tensor, spec in enumerate(here.layout.tokens):
        for target in range(there.layout.tp_size):
            for row in range(start // spec.span, end // spec.span):
                if (copy := there.token_row(target, tensor, row, BLOCKS_THERE)) is None:
                    continue
                source = target * here.layout.tp_size // there.layout.tp_size
                if not spec.is_shared:
                    source = row // here.layout.interleave % here.layout.dcp_size
                    source += here.layout.dcp_size * (target * num_replicas // there.layout.tp_size)
                copy.copy_(here.token_row(source, tensor, row, BLOCKS_HERE))


def copy_states(here: Job, there: Job, end: int) -> None:
    """Copy the rows of the last positions: a rank's share of the columns in each group, or all of them."""
    sizes = here.layout.tp_size, there.layout.tp_size
    for tensor, spec in enumerate(here.layout.states):
        for position in range(max(0, end - spec.num_last), end):
            rows = [here.state_row(rank, tensor, position, STATE_HERE) for rank in range(sizes[0])]
            if spec.num_parts:
                groups = torch.cat([row.reshape(spec.num_parts, -1) for row in rows], 1).chunk(sizes[1], 1)
            for target in range(sizes[1]):
                content = groups[target] if spec.num_parts else rows[target * sizes[0] // sizes[1]]
                copy = there.state_row(target, tensor, position, STATE_THERE)
                copy.copy_(content.reshape(copy.shape))


def test_rows_of_blocks_of_two_sizes() -> None:
    """Tensors whose rows have the same numbers in a sequence, at other places."""
    tokens = TokenSpec("wide", 0, 16, 8, 1, False), TokenSpec("narrow", 0, 16, 4, 1, False)
    layout = CacheLayout(1, 1, 1, tokens, (StateSpec("state", STATE, 1, 1, 0),))
    here, there = (PlainCache(layout, 0, 10, 2) for _ in range(2))
    content, blocks_there = Content.of(layout, 0, 30), (7, 1, 2, 9, 5, 8, 0, 3)
    here.fill(content, BLOCKS_HERE, 0, content.num_tokens)
    there.states[0] = content.state
    (part,) = Route(layout, 0, layout, 0).parts(0, content.num_tokens, 1 << 12)
    memory = torch.empty(part.num_bytes, dtype=torch.uint8)
    here.mover.gather(part, BLOCKS_HERE, None, memory)
    there.mover.scatter(part, blocks_there, None, memory)
    there.check(content, blocks_there, 0)


@pytest.mark.parametrize("most_known", [1, 64])
def test_a_prompt_moves_to_other_blocks(most_known: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a preemption: parts that are listed already lie in new blocks, and states in new places."""
    monkeypatch.setattr("dcpmla.transfer.parts._MOST_KNOWN", most_known)
    tokens = TokenSpec("wide", 0, 16, 8, 1, False), TokenSpec("narrow", 0, 16, 4, 1, False)
    layout = CacheLayout(1, 1, 1, tokens, (StateSpec("state", STATE, 1, 1, 0),))
    cache = PlainCache(layout, 0, 10, 4)
    content = Content.of(layout, 0, 30)
    route = Route(layout, 0, layout, 0)
    parts = [*route.parts(0, content.num_tokens, 64), *route.state_parts(content.num_tokens, 64)]
    for blocks, state in ((BLOCKS_HERE, STATE_HERE), (BLOCKS_THERE[::-1], STATE_THERE), (BLOCKS_HERE, STATE_HERE)):
        target = PlainCache(layout, 0, 10, 2)
        for tensor in cache.tensors:
            tensor.view(torch.uint8).random_()
        cache.fill(content, blocks, 0, content.num_tokens)
        cache.states[state] = content.state
        for part in parts:
            memory = torch.empty(part.num_bytes, dtype=torch.uint8)
            cache.mover.gather(part, blocks, state, memory)
            target.mover.scatter(part, BLOCKS_HERE, 0, memory)
        target.check(content, BLOCKS_HERE, 0)
