"""Sampling against transformers' logits warpers in float64, and against statistics; masks of allowed tokens."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dcpmla.runtime.draws import draw_tokens, log_sums, nucleus, ranks_of
from dcpmla.runtime.host_copy import HostCopy
from dcpmla.runtime.masks import NO_TOKEN, Masked, mask_rows
from dcpmla.runtime.request import Request, new_generator
from dcpmla.runtime.sampling import SamplingParams, sample
from tests.attention.test_small_kernels import compile_for_hopper
from tests.support.kernels import on_both
from tests.support.shared_memory import run_interpreted

VOCAB = 40


def draw(logits: Tensor, params: Sequence[SamplingParams]) -> list[int]:
    uniforms = [uniform(param.seed) for param in params]
    tokens = sample(logits, params, uniforms)
    assert (tokens.dtype, tokens.shape) == (torch.int64, (len(params),))
    numbers = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    assert torch.equal(sample(logits, params, numbers), tokens)
    return tokens.tolist()


def warped_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """[vocab] float64: transformers' probabilities."""
    scores = TemperatureLogitsWarper(float(params.temperature))(None, logits.double()[None])
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return scores.softmax(-1)[0]


def uniform(seed: int) -> float:
    return torch.rand((), dtype=torch.float64, generator=new_generator(seed)).item()


def inverse(probs: Tensor, number: float) -> int:
    """Return the first token whose cumulative probability exceeds the number, summed exactly."""
    values = probs.tolist()
    return next(token for token in range(len(values)) if math.fsum(values[: token + 1]) > number * math.fsum(values))


def random_logits(num_rows: int, seed: int, vocab: int = VOCAB) -> Tensor:
    return 3 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))


def some_params() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0, 0.3, 1, 2.5]),
        top_p=st.floats(0.01, 1),
        top_k=st.sampled_from([0, 1, 2, 7, VOCAB, 1000]),
        seed=st.integers(0, 2**64 - 1),
    )


@given(st.integers(0, 1000), some_params())
def test_tokens_are_those_of_transformers_distribution(logits_seed: int, params: SamplingParams) -> None:
    logits = random_logits(1, logits_seed)
    expected = (
        inverse(warped_probs(logits[0], params), uniform(params.seed))
        if params.temperature
        else logits[0].argmax().item()
    )
    assert draw(logits, [params]) == [expected]


@pytest.mark.parametrize("top_p", [1e-9, 0.2, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, VOCAB, 1000])
def test_kept_tokens_are_those_of_transformers(top_k: int, top_p: float) -> None:
    """Numbers so near each other that some fall to each token left."""
    logits = random_logits(1, seed=7) / 3
    params = SamplingParams(temperature=2.0, top_k=top_k, top_p=top_p)
    drawn = sample(logits.expand(1000, -1), [params] * 1000, [(number + 0.5) / 1000 for number in range(1000)])
    assert set(drawn.tolist()) == set(warped_probs(logits[0], params).nonzero().flatten().tolist())


@given(st.integers(0, 1000), st.lists(some_params(), min_size=1, max_size=6), st.data())
def test_a_row_does_not_depend_on_its_neighbours(
    logits_seed: int, params: list[SamplingParams], data: st.DataObject
) -> None:
    logits = random_logits(len(params), logits_seed)
    alone = [draw(logits[row : row + 1], [params[row]])[0] for row in range(len(params))]
    order = data.draw(st.permutations(range(len(params))))
    assert draw(logits[order], [params[row] for row in order]) == [alone[row] for row in order]


@on_both
def test_rows_of_a_large_batch(device: str) -> None:
    """More rows than are drawn at once, greedy ones between them."""
    logits = random_logits(300, seed=3, vocab=5000)
    params = [SamplingParams(temperature=row % 3, top_k=row % 5, top_p=1 - row % 2 / 5, seed=row) for row in range(300)]
    assert draw(logits.to(device), params) == [draw(logits[row : row + 1], [params[row]])[0] for row in range(300)]
    greedy = list(range(0, 300, 3))
    assert sample(logits, params, [0.5] * 300)[greedy].tolist() == logits[greedy].argmax(-1).tolist()


def test_a_requests_numbers_are_those_of_its_seed() -> None:
    """One a token, drafts or none; those of rejected drafts are drawn again."""
    numbers = torch.rand(20, dtype=torch.float64, generator=new_generator(9)).tolist()
    request = Request([1], SamplingParams(temperature=1.0, seed=9))
    assert request.draw(1) == numbers[:1]
    assert request.draw(4) == numbers[1:5]  # three drafts, of which one is accepted
    request.num_tried = 3
    assert request.draw(3) == numbers[2:8]  # two drafts more, before that is known
    request.num_tried, request.num_in_flight = 2, 1
    request.keep_draws(2)
    assert request.draw(1) == numbers[4:7]
    request.num_tried, request.num_in_flight = 0, 1
    request.keep_draws(3)
    assert request.draw(2) == numbers[7:9]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-10])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = 1e30 * random_logits(8, seed=2)
    params = [SamplingParams(temperature=temperature, top_p=0.9, seed=seed) for seed in range(8)]
    assert draw(logits, params) == logits.argmax(-1).tolist()


def test_a_huge_temperature_is_uniform() -> None:
    params = [SamplingParams(temperature=1e308, seed=seed) for seed in range(50)]
    assert draw(random_logits(50, seed=2), params) == [int(uniform(seed) * VOCAB) for seed in range(50)]


def test_ties() -> None:
    """Top-k keeps all that tie with its last token, as transformers does; top-p takes the first ids of a tie and no
    more than it needs.
    """
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -1.0]]).expand(500, -1)
    assert set(draw(logits, [SamplingParams(temperature=1.0, top_k=2, seed=seed) for seed in range(500)])) == {
        1,
        2,
        3,
        4,
    }
    assert set(
        draw(logits, [SamplingParams(temperature=1.0, top_k=2, top_p=0.6, seed=seed) for seed in range(500)])
    ) == {1, 2}
    equal = torch.zeros(500, 8)
    assert set(draw(equal, [SamplingParams(temperature=1.0, top_p=0.375, seed=seed) for seed in range(500)])) == {
        0,
        1,
        2,
    }


@given(st.integers(0, 1000), st.floats(0.001, 0.999), st.sampled_from([3, 300, 5000]), st.booleans())
def test_nucleus_is_that_of_a_stable_sort(seed: int, top_p: float, vocab: int, with_ties: bool) -> None:
    """Whatever the values' signs and digits: also of logits that few bits tell apart, or none."""
    logits = random_logits(2, seed, vocab)
    logits = (2 * logits).round() / 2 if with_ties else logits * torch.tensor([[1e-6], [5.0]]) + 1
    scores = logits.double() - logits.double().amax(-1, keepdim=True)
    masses = (scores.exp() * 2**44).long()
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(-1)
    expected = torch.zeros(logits.shape, dtype=torch.bool).scatter_(-1, order, probs.cumsum(-1) - probs < top_p)
    found = nucleus(logits, masses, torch.full((2, 1), top_p, dtype=torch.float64))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}, {"top_k": 5}, {"top_p": 0.9, "top_k": 5}], ids=str)
def test_tokens_without_probability_are_never_drawn(limits: dict[str, Any]) -> None:
    logits = torch.full((600, VOCAB), -torch.inf)
    logits[:, [3, 17]] = torch.tensor([1.0, 1.1])
    assert set(draw(logits, [SamplingParams(temperature=1.0, seed=seed, **limits) for seed in range(600)])) == {3, 17}


@pytest.mark.parametrize("vocab", [4, 1000, 100_000])
def test_the_ends_of_the_unit_interval(vocab: int) -> None:
    """The least and the greatest number that can be drawn choose the first and the last token with a probability."""
    logits = random_logits(2, seed=4, vocab=vocab)
    logits[:, [0, vocab - 1]] = -torch.inf
    numbers = torch.tensor([[1.0, 1.0, number] for number in (0.0, 1 - 2**-53)], dtype=torch.float64)
    assert draw_tokens(logits, numbers, torch.zeros(2, dtype=torch.int64)).tolist() == [1, vocab - 2]


def test_a_row_without_a_number_gives_some_token() -> None:
    numbers = torch.tensor([[1.0, 1.0, number] for number in (0.0, 0.5, 1 - 2**-53)], dtype=torch.float64)
    tokens = draw_tokens(torch.full((3, 4), torch.nan), numbers, torch.zeros(3, dtype=torch.int64)).tolist()
    assert set(tokens) <= set(range(4))


def test_sums_of_exponentials_do_not_depend_on_their_order() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 5000) * torch.tensor([0, 1, 3, 10, 30, 100, 1e30])[:, None]
    sums = log_sums(logits)
    torch.testing.assert_close(sums, logits.double().logsumexp(-1, keepdim=True).float(), rtol=3e-7, atol=3e-7)
    assert torch.equal(log_sums(logits[:, torch.randperm(5000)]), sums)
    logits[0, 3], logits[1, 4] = torch.nan, torch.inf
    assert not log_sums(logits[:2]).isfinite().any()


def test_ranks_are_in_order_and_zeros_are_equal() -> None:
    logits = torch.tensor([[torch.inf, 3.0, 1e-45, 0.0, -0.0, -1e-45, -2.0, -torch.inf]])
    ranks = ranks_of(logits)[0].tolist()
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == 7
    assert ranks[0] >= 0
    assert ranks[-1] < 1 << 32


def check_kernel(device: str, num_rows: int, vocab: int, tile: int = 2048) -> None:
    """Check the kernel against plain torch, on the CPU: rows of a batch in any order, each with its own numbers; ties,
    zeros of both signs, logits without probability, rows of NaN.
    """
    from dcpmla.runtime.kernels import sampling as kernels

    generator = torch.Generator().manual_seed(vocab)
    logits = random_logits(num_rows, vocab, vocab) * (0.1 + torch.rand(num_rows, 1, generator=generator))
    logits[1::8] = logits[1::8].round()
    logits[2::8], logits[3::8, ::3], logits[4::8, 5], logits[5::8] = 0.0, -torch.inf, torch.nan, torch.nan
    logits[6::8, ::2], logits[6::8, 1::2] = 0.0, -0.0
    logits[7::8] *= 1e-30
    row = torch.arange(num_rows)
    temperature = torch.tensor([0.3, 1, 2.5, 1e308, 5e-324], dtype=torch.float64)[row % 5]
    top_p, number = torch.rand(2, num_rows, dtype=torch.float64, generator=generator)
    top_p[::3], top_p[1] = 1.0, 1e-9
    numbers, top_k = torch.stack([temperature, top_p, number], 1), torch.tensor([0, 1, 7, 0, vocab, 20, 0])[row % 7]
    best, expected = logits.argmax(-1), draw_tokens(logits, numbers, top_k)
    rows = torch.randperm(num_rows, generator=generator)[: num_rows - 1]  # one keeps its best token
    (kept,) = set(row.tolist()) - set(rows.tolist())
    expected[kept] = best[kept]
    tokens = best.to(device)
    kernels.draw(logits.to(device), tokens, *(x.to(device) for x in (rows, numbers[rows], top_k[rows])), tile=tile)
    assert tokens.tolist() == expected.tolist()


def test_the_kernel_in_the_interpreter() -> None:
    run_interpreted(1, check_kernel, "cpu", 16, 300, 256)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "vocab"), [(2, 129_280), (64, 129_280), (48, 1 << 18), (37, 1000)])
def test_the_kernel(num_rows: int, vocab: int) -> None:
    check_kernel("cuda", num_rows, vocab)


def test_the_kernel_compiles_for_hopper() -> None:
    from dcpmla.runtime.kernels.sampling import draw_kernel

    types = {"logits_ptr": "*fp32", "numbers_ptr": "*fp64"}
    compile_for_hopper(draw_kernel, "i64", {"CHUNKS": 1024, "TILE": 1024}, **types)


def test_every_bit_of_a_seed_counts() -> None:
    seeds = [*range(2000), *((1 << bit) - 1 for bit in range(11, 65))]
    assert len({uniform(seed) for seed in seeds}) == len(seeds)


@on_both
def test_masks_are_applied_to_their_rows_alone(device: str) -> None:
    """More rows than are masked at once, a vocabulary of no whole number of words, and a mask that is wider."""
    rng, logits = np.random.default_rng(3), torch.randn(150, 1000, device=device)
    rows = rng.permutation(150)[:131]
    bits = rng.integers(0, 1 << 32, (131, 33), dtype=np.uint32)
    expected = logits.cpu().clone()
    for row, own in zip(rows, bits, strict=True):
        allowed = np.unpackbits(own.view(np.uint8), bitorder="little")[:1000]
        expected[row, allowed == 0] = -torch.inf
    before = logits.clone()
    assert torch.equal(mask_rows(logits, rows, bits).cpu(), expected)
    assert torch.equal(logits, before)
    drafts = HostCopy(torch.arange(5, device=device))
    assert drafts.wait() == [0, 1, 2, 3, 4]
    rejected = Masked(logits, [1, 3]).reject(torch.arange(4, device=device))
    assert rejected.tolist() == [0, NO_TOKEN, 2, NO_TOKEN]
