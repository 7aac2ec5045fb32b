"""Kimi Delta Attention over the states of requests: the recurrence, token after token, and long pieces of prompts chunk
by chunk, with flash-linear-attention's kernels.

The package `fla-core` is optional: without it such pieces go through the recurrence.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from dcpmla.attention.layers.linear.calls import (
    LINEAR_FROM,
    NORM_EPS,
    DeltaCall,
    DeltaPieces,
    DeltaRequests,
    DeltaWeights,
)
from dcpmla.operators import nothing, operator

# Bytes for each element of the output: the rows that kernels read and write, decays in float32, products within chunks,
# and the memory before each chunk. The number is summed from shapes, not measured.
BYTES_PER_ELEMENT = 40


@operator(
    "delta_attention",
    kernel="dcpmla.attention.layers.linear.kernels.recurrence:delta_attention",
    fake=nothing,
    mutates_args=("out", "recent", "memory"),
)
def delta_attention(call: DeltaCall, requests: DeltaRequests) -> None:
    """Attend with a step's tokens, one after the other, and move their requests' states past them. A custom op.

    For each head, with q and k of length 1 after a convolution and SiLU: S <- diag(exp(g)) S, then
    S <- S + beta k (v - S^T k)^T, and the output is norm(S^T q / sqrt(D)) sigmoid(gate).

    Source: Kimi Linear's report, equations 1 and 10; transformers' kimi_linear and glm5_next.
    """
    out, tokens, weights, state, eps, decay_floor = call
    num_heads = len(weights.log_rate)
    for start, first, end, number in zip(*(column.tolist() for column in requests), strict=True):
        if number < 0 or first == end:
            continue
        rows = slice(start, start + end - first)
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
    return -rate * F.softplus(biased, threshold=LINEAR_FROM)


def _convolve(qkv: Tensor, weight: Tensor, recent: Tensor, first: int) -> Tensor:
    """Return SiLU of the convolution of a request's rows [n, 3 h D], and store the last ones as recent."""
    before = torch.arange(first - weight.shape[1] + 1, first, device=qkv.device)
    context = torch.where(before[:, None] >= 0, recent[before % len(recent)], 0)
    inputs = torch.cat([context, qkv]).float().T
    kept = torch.arange(max(len(qkv) - len(recent), 0), len(qkv), device=qkv.device)
    recent[(first + kept) % len(recent)] = qkv[kept]
    return F.silu(F.conv1d(inputs, weight.float()[:, None], groups=len(weight)).T).to(qkv.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def takes_chunks(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether long pieces attend in chunks: on a GPU, in 16 bits, if flash-linear-attention is installed."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and has_library()


@cache
def has_library() -> bool:
    """Return whether flash-linear-attention is installed."""
    return find_spec("fla") is not None


def touch_chunk_memory(out: Tensor) -> None:
    """Allocate and free the memory of `attend_in_chunks` for an output [T, h D], for memory profiling."""
    out.new_empty(out.numel() * BYTES_PER_ELEMENT, dtype=torch.uint8)


@operator(
    "delta_chunks",
    kernel="dcpmla.attention.layers.linear.kernels.chunks:attend_in_chunks",
    fake=nothing,
    mutates_args=("out", "recent", "memory"),
)
def attend_in_chunks(call: DeltaCall, pieces: DeltaPieces) -> None:
    """Attend with long pieces, as `delta_attention` does. A custom op; its kernels need `takes_chunks`.

    Source: Kimi Linear's report, section 3.1.
    """
    lens = pieces.start_loc.diff()
    requests = DeltaRequests(pieces.token, pieces.first_position, pieces.first_position + lens, pieces.state)
    delta_attention.reference(call, requests)
