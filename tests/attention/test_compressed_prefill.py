"""Prefill of DeepSeek-V4's layers in chunks of entries, or with entries in place: transformers' outputs, in no more
memory than a profile touches.
"""

import dataclasses
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils import deterministic

from dcpmla import DCPConfig
from dcpmla.attention.backends.calls import DecodeCall
from dcpmla.attention.layers.compressed import prefill
from dcpmla.attention.layers.compressed.config import CompressedConfig
from dcpmla.attention.layers.compressed.prefill import RowLists
from dcpmla.attention.layers.compressed.step import CompressedMetadata
from dcpmla.cache.shared_rows import read_rows
from dcpmla.comm.exchange import Exchange
from dcpmla.comm.select import select_exchange
from tests.attention import test_compressed_layer
from tests.attention.test_compressed_layer import Layers, check, hidden_states, layout, tiny
from tests.attention.test_peak_memory import Allocations
from tests.support.ranks import on_ranks, run_ranks

# The first step has prompts of several lengths. Turns and decodes follow over contexts of several lengths. Queries of
# the shortest turns are fewer rows than the entries. Requests end before the first entry, within one and at its end.
TURNS = (
    (40, 2, 70, 61, 0, 9),
    (5, 2, 30, 190, 180, 1),
    (1, 1, 1, 4, 4, 4),
    (20, 30, 9, 5, 1, 5),
    (1, 3, 0, 1, 4, 1),
)
FEW_HEADS = {"num_attention_heads": 4, "o_groups": 4}
MORE_HEADS = {"num_attention_heads": 16, "o_groups": 16}


class Recorder:
    """An exchange that compares the rows of each gather with the reserved rows."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.reserved: list[tuple[int, int, torch.dtype]] = []
        self.held: list[weakref.ref[Tensor]] = []
        self.started = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)

    def reserve_context(self, num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.reserved.append((num_tokens, width, dtype))

    def start_context(self, rows: Tensor, order: Tensor, tokens: Tensor) -> Callable[[], Tensor]:
        ((num_reserved, width, dtype),) = set(self.reserved)  # one size: nothing is allocated again
        size = getattr(self._exchange, "size", 1)
        assert size * len(rows) <= num_reserved
        assert len(order) <= num_reserved
        assert (rows.shape[1], rows.dtype) == (width, dtype)
        self.held = [ref for ref in self.held if ref() is not None]
        assert len(self.held) <= 1  # the chunk that is attended to
        self.started += 1
        finish = self._exchange.start_context(rows, order, tokens)

        def finish_and_record() -> Tensor:
            gathered = finish()
            self.held.append(weakref.ref(gathered))
            return gathered

        return finish_and_record


@contextmanager
def recorded() -> Iterator[tuple[list[Recorder], Counter[str]]]:
    """Record the exchanges of `Layers`, and count calls of both routes."""
    recorders: list[Recorder] = []
    calls: Counter[str] = Counter()

    def select(*arguments: Any) -> Any:
        selection = select_exchange(*arguments)
        recorders.append(Recorder(selection.exchange))
        return dataclasses.replace(selection, exchange=recorders[-1])

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(prefill._Prefill, name)

        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        return call

    names = "attend_gathered", "attend_in_place"
    routes = {name: counted(name) for name in names}
    with patch.object(test_compressed_layer, "select_exchange", select), patch.multiple(prefill._Prefill, **routes):
        yield recorders, calls


class ProfiledLayers(Layers):
    """Layers whose memory was touched before the first step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        deterministic.fill_uninitialized_memory = False  # Nothing reads this memory.
        for layer in self.layers:
            layer.touch_peak_memory(300)
        deterministic.fill_uninitialized_memory = True


def check_turns(dcp: DCPConfig, has_chunks: bool) -> None:
    for changes, part_rows in ((MORE_HEADS, 320), (FEW_HEADS, 40)):
        tile = patch.multiple(prefill, LISTED_ROWS=1000, PART_ROWS=part_rows)  # several tiles of tokens
        with recorded() as (recorders, calls), tile, patch.object(test_compressed_layer, "Layers", ProfiledLayers):
            check(dcp, (TURNS,), changes=changes)
        (recorder,) = recorders
        num_layers = 3 * len(TURNS)
        assert calls["attend_gathered"] + calls["attend_in_place"] == num_layers
        assert (calls["attend_in_place"] > 0) == (changes == FEW_HEADS)
        num_gathered = calls["attend_gathered"] - len(TURNS)  # windows are on every rank
        assert recorder.started > 2 * num_gathered if has_chunks else recorder.started == num_gathered


@pytest.mark.parametrize(
    ("dcp", "num_rows"),
    [
        (layout(1, 1, 1), 8),
        (layout(1, 1, 1), 65536),
        (layout(2, 2, 1), 12),
        (layout(4, 4, 4, dcp_comm_backend="a2a", dcp_q_replicate=True, check_exchange=True), 24),
        (layout(4, 2, 2, dcp_comm_backend="a2a", block_size=16), 20),
    ],
    ids=lambda x: f"{x.decode_context_parallel_size} ranks" if isinstance(x, DCPConfig) else f"{x} rows",
)
def test_prefills_in_no_more_rows_than_reserved(dcp: DCPConfig, num_rows: int) -> None:
    dcp = dataclasses.replace(dcp, context_workspace_tokens=num_rows)
    run_ranks(dcp.tensor_parallel_size, check_turns, dcp, num_rows < 100)


@on_ranks(1)
def test_layers_share_lists() -> None:
    """Check that layers of a step share lists, for as long as they are short."""
    dcp, lengths = layout(1, 1, 1), [sum(tokens) for tokens in zip(*TURNS, strict=True)]
    hidden = [hidden_states(i, length) for i, length in enumerate(lengths)]
    with torch.no_grad():
        for limit, num_layers in ((prefill.KEPT_ROWS, 1), (0, 3)):
            listing = patch.object(RowLists, "_list_windows", autospec=True, side_effect=RowLists._list_windows)
            with patch.object(prefill, "KEPT_ROWS", limit), listing as listed:
                Layers(tiny(**FEW_HEADS), dcp, lengths).run(TURNS, hidden)
            assert listed.call_count == num_layers * len(TURNS)


@pytest.mark.gpu
@on_ranks(1, device="cuda")
def test_routes_agree_on_a_gpu() -> None:
    """Compare chunks, and entries in place, with one chunk, at the widths of DeepSeek-V4."""
    sizes = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "num_attention_heads": 64, "o_groups": 8}
    lengths = [sum(tokens) for tokens in zip(*TURNS, strict=True)]
    hidden = [hidden_states(i, length).cuda().bfloat16() for i, length in enumerate(lengths)]
    outputs = []
    for num_rows, in_place in ((65536, False), (64, False), (65536, True)):
        dcp = layout(1, 1, 1, block_size=64, context_workspace_tokens=num_rows)
        with torch.no_grad(), patch.object(CompressedConfig, "moves_queries", return_value=in_place):
            layers = Layers(tiny(**sizes), dcp, lengths, "cuda", torch.bfloat16)
            outputs.append([out for kind in layers.run(TURNS, hidden) for out in kind])
    for one_chunk, chunks, in_place_rows in zip(*outputs, strict=True):
        for rows in (chunks, in_place_rows):
            assert (rows - one_chunk).norm() <= 2e-2 * one_chunk.norm()


def attend_to_nothing(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Allocate the results of `mla_decode`, as a kernel does, and no scores."""
    return call.new_output()


def check_peak(layers: Layers, requests: list[tuple[int, int]]) -> None:
    """Compare the memory of a prefill of (new, cached) tokens with what its layers touch."""
    new, lens = [new for new, _ in requests], [new + cached for new, cached in requests]
    step = layers.step(list(range(len(lens))), new, lens)
    compressed, width = step.get(CompressedMetadata), layers.config.head_dim
    assert compressed.context is not None
    for layer, cache in zip(layers.layers, layers.cache, strict=True):
        selection = compressed.selection if layer.kind.has_indexer else None
        if selection is not None:
            selection.positions.copy_(torch.arange(selection.positions.shape[1]))
            selection.num_slots.fill_(0)
        layer.selector = None  # its memory is free before attention begins
        with Allocations() as profiled:
            layer.touch_peak_memory(sum(new))
        with Allocations() as taken:
            q, rows = (torch.randn(sum(new), *shape) for shape in ((layer.num_heads, width), (width,)))
            window = read_rows(cache.latents, compressed.context.window_slots[layer.ring], width, layer.down_proj.dtype)
            arguments = (window, rows), cache.latents, compressed, layer.kind, selection
            parts = zip(*prefill.attend_prefill(q, *arguments, layer.exchange, layers.dcp), strict=True)
            joined = [torch.cat(part) if len(part) > 1 else part[0] for part in parts]
            del parts, joined
        assert taken.peak <= profiled.peak, (layer.kind, requests)
    assert sum(part.numel() for parts in compressed.context.kept.values() for part in parts) <= prefill.KEPT_ROWS


@on_ranks(1)
def test_prefills_in_no_more_memory_than_a_profile_touches() -> None:
    sizes = {"head_dim": 256, "num_attention_heads": 2, "o_groups": 2}
    cases = ([(5, 40000)], 2048), ([(20, 600)] * 6, 256), ([(64, 0), (300, 700)], 256)
    small_tiles = patch.multiple(prefill, LISTED_ROWS=512, PART_ROWS=64, KEPT_ROWS=100)
    no_scores = patch.object(prefill, "mla_decode", attend_to_nothing)
    for (requests, num_rows), in_place in itertools.product(cases, (True, False)):
        choice = patch.object(CompressedConfig, "moves_queries", return_value=in_place)
        with small_tiles, no_scores, choice:
            dcp = layout(1, 1, 1, context_workspace_tokens=num_rows)
            check_peak(Layers(tiny(**sizes), dcp, [new + cached for new, cached in requests]), requests)
