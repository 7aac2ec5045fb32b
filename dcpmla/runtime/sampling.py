"""Logits -> tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sample(logits: Tensor, temperatures: Sequence[float], generators: Sequence[torch.Generator]) -> Tensor:
    """Choose a token for each row.

    Args:
        logits: [n, vocab] float32.
        temperatures: [n]; 0 takes the best token, else the softmax of logits / temperature is drawn from.
        generators: [n] on the CPU, so that a seed gives the same numbers on every device; a draw uses vocab of them.
    Returns:
        [n] int64 on the device of the logits.
    Source: the exponential race: argmax of p_i / e_i with e_i ~ Exp(1) has the distribution p.
    """
    tokens = logits.argmax(-1)
    for row, (temperature, generator) in enumerate(zip(temperatures, generators, strict=True)):
        if temperature > 0:
            scores = logits[row].cpu()
            probs = torch.softmax((scores - scores.max()) / temperature, -1)  # the difference first: a tiny temperature may overflow
            tokens[row] = (probs / torch.empty_like(probs).exponential_(generator=generator)).argmax()
    return tokens
