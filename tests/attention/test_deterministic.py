"""Attention in a fixed order: the same bits alone and in batches, for every number of ranks and cut of a prompt."""

import itertools

import torch
from torch import Tensor

from dcpmla.merge import merge_pair
from tests.support.ordered import Batch, Sizes, alone, decode, in_float64, prefill

SIZES = Sizes()
LENGTHS = (1, 63, 64, 65, 511, 513, 700, 2000)
BATCH: Batch = [(seed, length, 1) for seed, length in enumerate(LENGTHS)]
SEGMENTS: Batch = [(seed, 62 + 100 * new, new) for seed, new in enumerate((1, 5, 2, 3, 4))]
PROMPT = 200


def check_equal(got: list[tuple[Tensor, Tensor]], wanted: list[tuple[Tensor, Tensor]]) -> None:
    assert all(map(torch.equal, *(itertools.chain(*each) for each in (got, wanted))))


def test_decode_alone_in_batches_and_over_ranks() -> None:
    wanted = decode(SIZES, 1, BATCH)
    for size in (2, 4, 8):
        check_equal(decode(SIZES, size, BATCH), wanted)
    check_equal([decode(SIZES, 2, batch)[0] for batch in alone(BATCH)], wanted)
    check_equal(decode(SIZES, 8, BATCH[::-1])[::-1], wanted)
    long = decode(SIZES, 1, [(7, 9000, 1), *BATCH])  # more than a split
    check_equal(long[1:], wanted)
    check_equal(decode(SIZES, 8, [(7, 9000, 1)]), long[:1])


def test_decode_is_accurate() -> None:
    for (out, lse), (wanted, wanted_lse) in zip(decode(SIZES, 2, BATCH), decode_float64(BATCH), strict=True):
        torch.testing.assert_close(out.double(), wanted, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(lse.double(), wanted_lse, atol=2e-6, rtol=1e-6)


def decode_float64(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Attend by one softmax over all keys, in float64."""
    sizes, found = in_float64(SIZES), []
    for seed, length, new in batch:
        latents = sizes.rows(seed, length, sizes.latent + sizes.rope).float().double()
        q = sizes.rows(seed + 1000, length, sizes.num_heads, latents.shape[1])[length - new :]
        scores = torch.einsum("thd,sd->ths", q, latents) * sizes.scale
        scores += torch.full((new, length), -torch.inf).triu(length - new + 1)[:, None]
        found.append((scores.softmax(-1) @ latents[:, : sizes.latent], scores.logsumexp(-1)))
    return found


def test_segments_of_many_tokens_equal_their_tokens_alone() -> None:
    wanted = [decode(SIZES, 4, batch)[0] for batch in alone(SEGMENTS)]
    for size, max_query_len in ((1, 5), (4, 2), (8, 3)):
        got = decode(SIZES, size, SEGMENTS, max_query_len)
        tokens = [(out[index : index + 1], lse[index : index + 1]) for out, lse in got for index in range(len(out))]
        check_equal(tokens, wanted)


def test_another_order_of_the_merge_has_other_bits() -> None:
    def in_turn(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        merged = out[0], lse[0]
        for part in range(1, len(out)):
            merged = merge_pair(*merged, out[part], lse[part])
        return merged

    (wanted, _), (other, _) = (decode(SIZES, 8, BATCH[-1:], **merge)[0] for merge in ({}, {"merge": in_turn}))
    assert not torch.equal(other, wanted)
    torch.testing.assert_close(other, wanted)


def test_prefill_in_pieces_over_ranks_and_chunks() -> None:
    wanted = prefill(SIZES, 1, [(3, PROMPT, PROMPT)])[0]
    for size, piece, workspace in ((1, 1, 128), (2, 7, 128), (4, 64, 256), (1, 100, 1 << 16), (4, PROMPT, 256)):
        ends = [*range(piece, PROMPT, piece), PROMPT]
        ends = ends[-12:] if piece == 1 else ends
        for start, end in itertools.pairwise([ends[0] - piece, *ends]):
            got = prefill(SIZES, size, [(3, end, end - start)], workspace)[0]
            assert torch.equal(got, wanted[start:end]), (size, piece, start)
    batch = [(1, 150, 20), (3, PROMPT, 60), (2, 300, 299), (3, 100, 100)]
    for size, workspace in ((1, 128), (2, 512)):
        got = prefill(SIZES, size, batch, workspace)
        assert torch.equal(got[1], wanted[-60:])
        assert torch.equal(got[3], wanted[:100])


def test_prefill_is_accurate() -> None:
    batch = [(3, PROMPT, 90), (4, 70, 70)]
    for got, wanted in zip(prefill(SIZES, 2, batch, 128), prefill(in_float64(SIZES), 1, batch), strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-4)
