"""Attention in a fixed order: the same bits alone and in batches, for every number of ranks and cut of a prompt."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla import MLAAttention
from dcpmla.attention.backends.calls import DecodeCall
from dcpmla.attention.backends.reference import mla_decode
from dcpmla.attention.mla.latent_spec import LatentSpec
from dcpmla.integrations.families.table import attention_of
from dcpmla.merge import merge_partials, merge_tree
from tests.support.dense_layer import CONFIG
from tests.support.layouts import dcp_config
from tests.support.models import tiny_config
from tests.support.ordered import Batch, Sizes, alone, decode, in_float64, prefill

SIZES = Sizes()
LENGTHS = (1, 63, 64, 65, 511, 513, 700, 2000)
BATCH: Batch = [(seed, length, 1) for seed, length in enumerate(LENGTHS)]
SEGMENTS: Batch = [(seed, 62 + 100 * new, new) for seed, new in enumerate((1, 5, 2, 3, 4))]
PROMPT = 200


def check_equal(got: list[tuple[Tensor, Tensor]], reference: list[tuple[Tensor, Tensor]]) -> None:
    assert all(map(torch.equal, *(itertools.chain(*each) for each in (got, reference))))


def attend_at_once(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Attend by one softmax over all keys."""
    return mla_decode(call._replace(num_tile_lanes=None))


def test_decode_alone_in_batches_and_over_ranks() -> None:
    reference = decode(SIZES, 1, BATCH)
    exact = decode(in_float64(SIZES), 1, BATCH, run=attend_at_once)
    for (out, lse), (wanted, wanted_lse) in zip(reference, exact, strict=True):
        torch.testing.assert_close(out.double(), wanted, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(lse, wanted_lse, atol=2e-6, rtol=1e-6)
    for size in (2, 4, 8):
        check_equal(decode(SIZES, size, BATCH), reference)
    check_equal([decode(SIZES, 2, batch)[0] for batch in alone(BATCH)], reference)
    check_equal(decode(SIZES, 8, BATCH[::-1])[::-1], reference)
    long = decode(SIZES, 1, [(7, 9000, 1), *BATCH])  # more than a split
    check_equal(long[1:], reference)
    check_equal(decode(SIZES, 8, [(7, 9000, 1)]), long[:1])


def test_segments_of_many_tokens_equal_their_tokens_alone() -> None:
    reference = [decode(SIZES, 4, batch)[0] for batch in alone(SEGMENTS)]
    for size, max_query_len in ((1, 5), (4, 2), (8, 3)):
        got = decode(SIZES, size, SEGMENTS, max_query_len)
        tokens = [(out[index : index + 1], lse[index : index + 1]) for out, lse in got for index in range(len(out))]
        check_equal(tokens, reference)


def test_the_tree_takes_any_number_of_parts_and_is_the_same_over_ranks() -> None:
    out, lse = torch.randn(8, 5, 3, 4), 3 * torch.randn(8, 5, 3)
    lse[torch.rand_like(lse) < 0.3] = -torch.inf
    lse[:, 1] = -torch.inf
    out[lse == -torch.inf] = torch.nan
    for num in range(2, 9):
        torch.testing.assert_close(merge_tree(out[:num], lse[:num]), merge_partials(out[:num], lse[:num]))
    for size in (2, 4):
        parts = [merge_tree(out[rank::size], lse[rank::size]) for rank in range(size)]
        check_equal([merge_tree(*map(torch.stack, zip(*parts, strict=True)))], [merge_tree(out, lse)])


def test_prefill_in_pieces_over_ranks_and_chunks() -> None:
    reference = prefill(SIZES, 1, [(3, PROMPT, PROMPT)])[0]
    for size, piece, workspace in ((1, 1, 128), (2, 7, 128), (4, 64, 256), (1, 100, 1 << 16), (4, PROMPT, 256)):
        ends = [*range(piece, PROMPT, piece), PROMPT]
        ends = ends[-12:] if piece == 1 else ends
        for start, end in itertools.pairwise([ends[0] - piece, *ends]):
            got = prefill(SIZES, size, [(3, end, end - start)], workspace)[0]
            assert torch.equal(got, reference[start:end]), (size, piece, start)
    exact = prefill(in_float64(SIZES), 1, [(3, PROMPT, PROMPT)])[0]
    torch.testing.assert_close(reference.double(), exact, atol=1e-4, rtol=1e-4)
    batch = [(1, 150, 20), (3, PROMPT, 60), (2, 300, 299), (3, 100, 100)]
    for size, workspace in ((1, 128), (2, 512)):
        outputs = prefill(SIZES, size, batch, workspace)
        assert torch.equal(outputs[1], reference[-60:])
        assert torch.equal(outputs[3], reference[:100])


def test_kinds_without_a_fixed_order_are_refused() -> None:
    dcp = dcp_config(1, 1, 1, deterministic=True)
    placement: Any = SimpleNamespace(dcp=dcp)
    for changes, name in (({"has_sinks": True}, "attention sinks"), ({"num_gates": 1}, "gates")):
        with pytest.raises(ValueError, match=f"does not support {name}"):
            MLAAttention(replace(CONFIG, **changes), placement)
    with pytest.raises(ValueError, match=r"deterministic \(--deterministic\) does not support an indexer"):
        attention_of(tiny_config("deepseek_v32")).check_layout(dcp)
    for config in (replace(CONFIG, has_sinks=True), replace(CONFIG, window=8)):
        with pytest.raises(ValueError, match="deterministic"):
            LatentSpec(config).check_layout(dcp)
