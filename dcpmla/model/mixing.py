"""The values of hyper-connections: streams, the weights that mix them, and a model's parameters and constants."""

from typing import NamedTuple

from torch import Tensor


class Mixing(NamedTuple):
    """The way of a part's output into S streams: stream s becomes post[s] out + the sum over j of comb[j, s] stream j.

    Attributes:
        post: float32 [T, S].
        comb: float32 [T, S, S], doubly stochastic; None for the identity.
    """

    post: Tensor
    comb: Tensor | None


class Streams(NamedTuple):
    """The residual, and the output that is not mixed into it yet.

    Attributes:
        values: [T, S, hidden].
        mixing: Weights of the part's output; None if there is nothing to mix.
        out: [T, hidden], output of the part.
        pre: Weights of the streams in the next part's input, float32 [T, S], if connections are delayed. None before
            the first part, which takes stream 0.
    """

    values: Tensor
    mixing: Mixing | None = None
    out: Tensor | None = None
    pre: Tensor | None = None


class Projection(NamedTuple):
    """The weights of a hyper-connection, float32.

    Attributes:
        fn: [N, S hidden], from all streams to N numbers: (2 + S) S before a part, or 2 S if streams are not mixed with
            each other; S before the head.
        base: [N].
        scale: [3], [2] or [1], a factor for each of the parts of N.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor


class Constants(NamedTuple):
    """The constants of a model's hyper-connections.

    Attributes:
        eps: Epsilon of norms.
        stream_eps: Epsilon of the streams' weights, and of their iterations.
        num_iters: Iterations of Sinkhorn and Knopp, which make comb doubly stochastic; 0 for no comb.
        post_scale, post_eps: post is post_scale times a sigmoid, plus post_eps.
        delays: Whether a part's input takes the streams' weights of the connection before. The head's input takes the
            last connection's.
    """

    eps: float
    stream_eps: float
    num_iters: int
    post_scale: float = 2.0
    post_eps: float = 0.0
    delays: bool = False
