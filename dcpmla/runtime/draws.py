"""Draws of tokens from logits in plain torch, exact to the last token on every device."""

import torch
from torch import Tensor

_DIGITS = (21, 1 << 11), (10, 1 << 11), (0, 1 << 10)  # lowest bit and number of values of each digit of a 32-bit rank
_ONE = float(1 << 44)  # the mass of the best token, relative to which masses are computed


def draw_tokens(logits: Tensor, numbers: Tensor, top_k: Tensor) -> Tensor:
    """Invert each row's cumulative distribution, in the vocabulary's order, at a number in [0, 1).

    In this order a small change of the logits moves every boundary between tokens a little, and seldom past the number.
    Probability masses are whole numbers, 2^44 for the best token, so that no sum depends on its order (a vocabulary of
    2^18 tokens fits): devices differ by the last bit of an exponential at most, 1 in few masses. Tokens whose
    probability is below 2^-44 of the best one's are never drawn. A row with NaN may yield any token.

    Args:
        logits: [n, vocab] float32.
        numbers: [n, 3] float64: temperature, top_p, the number.
        top_k: [n] int64, at most vocab.
    Returns:
        [n] int64.
    """
    temperature, top_p, uniform = numbers.split(1, dim=-1)
    scores = logits.double()
    scores -= scores.amax(-1, keepdim=True)  # before the division: a tiny temperature may overflow, to -inf only
    scores /= temperature
    masses = (scores.exp().nan_to_num(0.0) * _ONE).long()
    if largest := int(top_k.max()):
        best = logits.topk(largest).values.gather(-1, (top_k[:, None] - 1).clamp(min=0))
        masses = masses.where((logits >= best) | (top_k[:, None] == 0), 0)  # ties with the last one stay
    if (top_p < 1).any():
        masses = masses.where(nucleus(logits, masses, top_p), 0)
    cumulative = masses.cumsum(-1)
    total = cumulative[:, -1:]
    targets = (uniform * total).long().minimum(total - 1)  # a row of NaN has no mass: its token is the first
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1)


def nucleus(logits: Tensor, masses: Tensor, top_p: Tensor) -> Tensor:
    """Return the mask of tokens that top-p keeps; among equal logits the lowest ids are kept first.

    The mask is computed without sorting, from the logits' order as whole numbers.

    Args:
        logits: [n, vocab] float32.
        masses: [n, vocab] int64, in the same order; 0 for tokens that are left out already.
        top_p: [n, 1] float64.
    """
    ranks = ranks_of(logits)
    total = masses.sum(-1, keepdim=True)
    target = (total * top_p).ceil().long().minimum(total)
    last, mass_before = _find_last(ranks, masses, target)
    is_last = ranks == last
    mass_before = mass_before + (is_last.cumsum(-1) - 1) * masses  # valid for tokens with the last rank
    return (ranks < last) | (is_last & (mass_before < target)) | (top_p >= 1)


def ranks_of(logits: Tensor) -> Tensor:
    """Return logits' places in the order of all float32 numbers, int64 in [0, 2^32), 0 for the greatest."""
    bits = (logits + 0.0).view(torch.int32).long()  # the zeros are equal
    return torch.where(bits < 0, bits + (1 << 32), (1 << 31) - 1 - bits)


def log_sums(logits: Tensor) -> Tensor:
    """Return log(sum(exp(logits))) of each row, by sums of whole numbers as in `draw_tokens`.

    Args:
        logits: [n, vocab] float32.
    Returns:
        [n, 1] float32; NaN or infinite for rows whose maximum is.
    """
    best = logits.amax(-1, keepdim=True)
    masses = ((logits - best).exp() * _ONE).long()
    return best + (masses.sum(-1, keepdim=True).double() / _ONE).log().float()


def _find_last(ranks: Tensor, weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Find the rank at which the weights of the lowest ranks reach a sum, digit by digit.

    Args:
        ranks: [n, vocab] int64 in [0, 2^32).
        weights: [n, vocab] int64, not negative.
        target: [n, 1] int64, at most the sum of all.
    Returns:
        [n, 1] int64 the rank; [n, 1] int64 the sum before it.
    """
    last, before = torch.zeros_like(target), torch.zeros_like(target)
    for shift, size in _DIGITS:
        digits = ranks >> shift & (size - 1)
        sums = weights.new_zeros(len(ranks), size).scatter_add_(-1, digits, weights)
        reached = sums.cumsum(-1)
        digit = (reached < target - before).sum(-1, keepdim=True).clamp(max=size - 1)
        last += digit << shift
        before += (reached - sums).gather(-1, digit)
        weights = weights.where(digits == digit, 0)
    return last, before
