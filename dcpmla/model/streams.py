"""Hyper-connections: a residual of several streams, which are mixed by weights that follow from the streams themselves.

A part of a block (attention, or experts) takes one row for all streams, their weighted sum. Its output is added to
every stream, while the streams are mixed: that waits for the next part, whose weights follow from the result.

Independent hyper-connections (HY V4) add the output to the streams without mixing these.

Delayed hyper-connections (DeepSeek-V4.1) weigh a part's input as the connection before found, so that the sum does not
wait for the products with the streams.

Source: DeepSeek-V4's report, section 2.2 (mHC), and the code published with it (inference/model.py); transformers'
hy_v4.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from dcpmla.model.mixing import Constants, Mixing, Projection, Streams
from dcpmla.parallel.fp8 import quantize_rows
from dcpmla.parallel.quantized import NormedRows, PlainRows, plain


class Connection(nn.Module):
    """A hyper-connection and the norm after it; before the head, the collapse of the streams.

    Args:
        norm: Weight [hidden].
    """

    def __init__(self, projection: Projection, norm: Tensor, constants: Constants) -> None:
        super().__init__()
        self.fn, self.base, self.scale, self.norm = (
            nn.Parameter(tensor.float(), requires_grad=False) for tensor in (*projection, norm)
        )
        self.constants = constants

    def forward(self, streams: Streams, quantizes: bool = False) -> tuple[PlainRows, Streams]:
        """Return the part's input [T, hidden], normalized, and the streams that its output is to be mixed into.

        Args:
            quantizes: Whether the input is also quantized, with the bits of `quantize_rows`.
        """
        projection = Projection(self.fn, self.base, self.scale)
        if streams.values.is_cuda:
            from dcpmla.model.kernels import streams as kernels  # triton exists on Linux only

            return kernels.enter(streams, projection, self.norm, self.constants, quantizes)
        x, streams = enter(streams, projection, self.norm, self.constants)
        return NormedRows(x, quantize_rows(x)) if quantizes else x, streams

    def collapse(self, rows: Tensor) -> Tensor:
        """Return [n, hidden], normalized, of all streams [n, S hidden]."""
        return plain(self(Streams(rows.unflatten(1, (-1, len(self.norm)))))[0])


class StreamMean(nn.Module):
    """The mean of all streams and the norm after it, before the head (GLM-5-Next).

    Args:
        norm: Weight [hidden].
    """

    def __init__(self, norm: Tensor, eps: float) -> None:
        super().__init__()
        self.norm, self.eps = nn.Parameter(norm.float(), requires_grad=False), eps

    def forward(self, streams: Streams) -> tuple[PlainRows, Streams]:
        """Return the head's input [T, hidden], normalized, and the streams."""
        values = finish(streams)
        mean = values.float().mean(1)
        normed = mean * torch.rsqrt(mean.square().mean(-1, keepdim=True) + self.eps) * self.norm
        return normed.to(values.dtype), Streams(values)

    def collapse(self, rows: Tensor) -> Tensor:
        """Return [n, hidden], normalized, of all streams [n, S hidden]."""
        return plain(self(Streams(rows.unflatten(1, (-1, len(self.norm)))))[0])


class DelayedCollapse(nn.Module):
    """The collapse before the head of delayed connections, which has a norm alone.

    Args:
        norm: Weight [hidden].
    """

    def __init__(self, norm: Tensor, eps: float) -> None:
        super().__init__()
        self.norm, self.eps = nn.Parameter(norm.float(), requires_grad=False), eps

    def forward(self, streams: Streams) -> tuple[Tensor, Streams]:
        """Return the head's input [T, hidden], and the streams with everything mixed in."""
        values = finish(streams)
        return weigh(values, streams.pre, self.norm, self.eps), Streams(values)


def finish(streams: Streams) -> Tensor:
    """Return the streams [T, S, hidden] with everything mixed in."""
    if streams.mixing is not None and streams.values.is_cuda:
        from dcpmla.model.kernels import mix as kernels

        return kernels.mix(streams)
    return mix(streams)


def mix(streams: Streams) -> Tensor:
    """Compute `finish`: sums in float32, rounded once."""
    values, mixing, out, _ = streams
    if mixing is None:
        return values
    assert out is not None
    wide = values.float()
    mixed = wide if mixing.comb is None else torch.einsum("tjs,tjh->tsh", mixing.comb, wide)
    return (mixed + mixing.post[..., None] * out.float()[:, None]).to(values.dtype)


def enter(streams: Streams, projection: Projection, norm: Tensor, constants: Constants) -> tuple[Tensor, Streams]:
    """Compute `Connection.forward`, in float32 but for the streams' dtype, to which streams, their sum and the result
    are rounded.
    """
    values, eps = mix(streams), constants.stream_eps
    num_streams, wide = values.shape[1], values.flatten(1).float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + constants.eps)
    numbers = functional.linear(wide, projection.fn) * factor
    sizes = [num_streams, num_streams, num_streams**2][: len(projection.scale)]
    parts = zip(numbers.split(sizes, -1), projection.base.split(sizes), projection.scale, strict=True)
    pre, *others = (number * scale + base for number, base, scale in parts)
    pre = torch.sigmoid(pre) + eps
    x = weigh(values, streams.pre if constants.delays else pre, norm, constants.eps)
    if not others:
        return x, Streams(values)
    post = constants.post_scale * torch.sigmoid(others[0]) + constants.post_eps
    comb = _balance(others[1].unflatten(-1, (num_streams, num_streams)), constants) if len(others) > 1 else None
    return x, Streams(values, Mixing(post, comb), pre=pre if constants.delays else None)


def weigh(values: Tensor, pre: Tensor | None, norm: Tensor, eps: float) -> Tensor:
    """Return the sum [T, hidden] of streams [T, S, hidden] with weights [T, S], normalized; None takes stream 0."""
    row = values[:, 0] if pre is None else (pre[..., None] * values.float()).sum(1).to(values.dtype)
    row = row.float()
    return (row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps) * norm).to(values.dtype)


def _balance(logits: Tensor, constants: Constants) -> Tensor:
    """Return doubly stochastic matrices [T, S, S] of logits, by the iterations of Sinkhorn and Knopp."""
    eps = constants.stream_eps
    comb = torch.softmax(logits, -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(constants.num_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb
