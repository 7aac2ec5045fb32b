"""Kimi Delta Attention over the states of requests: the recurrence, token after token."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla.operators import operator

_NORM_EPS = 1e-6  # of the norms of queries and keys
_LINEAR_FROM = 20.0  # softplus(x) is x from here on


class DeltaTokens(NamedTuple):
    """The projections of a step's tokens for h heads of width D.

    Attributes:
        qkv: Queries, keys and values before the convolution [T, 3 h D].
        decay: Logits of the decays [T, h D].
        beta: Logits of the rates at which the state learns [T, h].
        gate: Logits of the output's gates [T, h D].
    """

    qkv: Tensor
    decay: Tensor
    beta: Tensor
    gate: Tensor


class DeltaWeights(NamedTuple):
    """The parameters of h heads.

    Attributes:
        conv: Weights of the convolution [3 h D, conv_size], the last column for the token itself.
        log_rate: Logarithm of each head's rate of decay [h], float32.
        decay_bias: Bias of the decays [h D], float32.
        norm: Weight of the norm of the output [D].
    """

    conv: Tensor
    log_rate: Tensor
    decay_bias: Tensor
    norm: Tensor


class DeltaState(NamedTuple):
    """The states of all requests in one layer on one rank.

    Attributes:
        recent: Latest inputs of the convolution [num_states, num_recent, 3 h D]: the token at position p has row
            p % num_recent.
        memory: Keys to values [num_states, num_copies, h, D, D], float32: copy p % num_copies is the one after the
            token at position p, so that a request whose drafts were rejected continues from an earlier copy.
    """

    recent: Tensor
    memory: Tensor


class DeltaRequests(NamedTuple):
    """The requests of a step, int32.

    Attributes:
        start: First row of each request's tokens [num_reqs].
        first_position, end: Position of its first token, and of the token after its last [num_reqs].
        state: Number of its state [num_reqs]; negative for padding.
    """

    start: Tensor
    first_position: Tensor
    end: Tensor
    state: Tensor


@operator(
    "delta_attention",
    kernel="dcpmla.attention.linear.kernels:delta_attention",
    fake=lambda: None,
    mutates_args=("out", "recent", "memory"),
)
def delta_attention(
    out: Tensor,
    tokens: DeltaTokens,
    weights: DeltaWeights,
    state: DeltaState,
    requests: DeltaRequests,
    eps: float,
    decay_floor: float | None,
) -> None:
    """Attend with a step's tokens, one after the other, and move their requests' states past them. A custom op.

    For each head, with q and k of length 1 after a convolution and SiLU: S <- diag(exp(g)) S, then
    S <- S + beta k (v - S^T k)^T, and the output is norm(S^T q / sqrt(D)) sigmoid(gate).

    Args:
        out: Output [T, h D], written at the rows of requests that are not padding; a request's rows past its last
            token get zeros, up to the next request.
        eps: Epsilon of the output's norm.
        decay_floor: Factor of sigmoid(exp(log_rate) (decay + bias)), which is the logarithm g of the decay; None for
            g = -exp(log_rate) softplus(decay + bias).
    Source: Kimi Linear's report, equations 1 and 10; transformers' kimi_linear and glm5_next.
    """
    num_heads = len(weights.log_rate)
    starts = [*requests.start.tolist(), len(out)]
    numbers = zip(*(column.tolist() for column in requests[1:]), strict=True)
    for index, (first, end, number) in enumerate(numbers):
        out[starts[index] : starts[index + 1]] = 0
        if number < 0:
            continue
        rows = slice(starts[index], starts[index] + end - first)
        q, k, v = _convolve(tokens.qkv[rows], weights.conv, state.recent[number], first).float().chunk(3, -1)
        q, k, v = (x.unflatten(-1, (num_heads, -1)) for x in (q, k, v))
        q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
        decay = log_decay(tokens.decay[rows], weights, decay_floor).exp()
        beta = tokens.beta[rows].float().sigmoid()
        copies = state.memory[number]
        memory = copies[(first - 1) % len(copies)] if first else torch.zeros_like(copies[0])
        attended = torch.empty_like(v)
        for row in range(end - first):
            memory = memory * decay[row, :, :, None]
            error = v[row] - torch.einsum("hkv,hk->hv", memory, k[row])
            memory = memory + k[row, :, :, None] * (beta[row, :, None] * error)[:, None]
            attended[row] = torch.einsum("hkv,hk->hv", memory, q[row])
            copies[(first + row) % len(copies)] = memory
        gate = tokens.gate[rows].float().unflatten(-1, (num_heads, -1)).sigmoid()
        attended = F.rms_norm(attended, attended.shape[-1:], weights.norm.float(), eps) * gate
        out[rows] = attended.flatten(1).to(out.dtype)


def log_decay(logits: Tensor, weights: DeltaWeights, decay_floor: float | None) -> Tensor:
    """Return the logarithms of decays [T, h, D] float32 of their logits [T, h D]."""
    biased = (logits.float() + weights.decay_bias).unflatten(-1, (len(weights.log_rate), -1))
    rate = weights.log_rate.exp()[:, None]
    if decay_floor is not None:
        return decay_floor * torch.sigmoid(rate * biased)
    return -rate * F.softplus(biased, threshold=_LINEAR_FROM)


def _convolve(qkv: Tensor, weight: Tensor, recent: Tensor, first: int) -> Tensor:
    """Return SiLU of the convolution of a request's rows [n, 3 h D], and store the last ones as recent."""
    before = torch.arange(first - weight.shape[1] + 1, first, device=qkv.device)
    context = torch.where(before[:, None] >= 0, recent[before % len(recent)], 0)
    inputs = torch.cat([context, qkv]).float().T
    kept = torch.arange(max(len(qkv) - len(recent), 0), len(qkv), device=qkv.device)
    recent[(first + kept) % len(recent)] = qkv[kept]
    return F.silu(F.conv1d(inputs, weight.float()[:, None], groups=len(weight)).T).to(qkv.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS)
