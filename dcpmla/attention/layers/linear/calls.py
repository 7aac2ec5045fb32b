"""The arguments of one call of Kimi Delta Attention."""

from typing import NamedTuple

from torch import Tensor

NORM_EPS = 1e-6  # norms of queries and keys divide by sqrt(x^2 + this)
LINEAR_FROM = 20.0  # softplus(x) is x from here on


class DeltaTokens(NamedTuple):
    """The projections of a step's tokens for h heads of width D.

    Attributes:
        qkv: Queries, keys and values before the convolution [T, 3 h D].
        decay: Logits of the decays [T, h D].
        beta: Logits of the rates of replacement [T, h].
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


class DeltaCall(NamedTuple):
    """The arguments of attention for a step's tokens, of requests or of pieces.

    Attributes:
        out: Output [T, h D], written at the tokens of requests, or of pieces, that are not padding.
        eps: Epsilon of the output's norm.
        decay_floor: Factor of sigmoid(exp(log_rate) (decay + bias)), which is the logarithm g of the decay; None for
            g = -exp(log_rate) softplus(decay + bias).
    """

    out: Tensor
    tokens: DeltaTokens
    weights: DeltaWeights
    state: DeltaState
    eps: float
    decay_floor: float | None


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


class DeltaPieces(NamedTuple):
    """Requests of a step that attend in chunks, int32. Their tokens, one request after the other, are rows.

    Attributes:
        start_loc: First row of each request [num_pieces + 1]; the last is the number of rows.
        token: Index of each request's first token among the step's tokens [num_pieces].
        first_position: Position of its first token [num_pieces].
        state: Number of its state [num_pieces]; negative for padding.
        chunks: Request of each chunk, and the chunk's number in it [num_chunks, 2]; -1 for padding.
        chunk_starts: Number of chunks before each request's [num_pieces + 1].
    """

    start_loc: Tensor
    token: Tensor
    first_position: Tensor
    state: Tensor
    chunks: Tensor
    chunk_starts: Tensor
