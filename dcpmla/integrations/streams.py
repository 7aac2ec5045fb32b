"""DeepSeek-V4's parallel streams of the residual: what makes one of them for the head, and its MTP module over them."""

from typing import Any

import torch
from torch import Tensor, nn

from dcpmla.attention.step import StepMetadata
from dcpmla.cache.compressed import AnyCache
from dcpmla.comm.reduce import rms_norm
from dcpmla.parallel.linear import Linear


class Collapse(nn.Module):
    """The streams of rows, collapsed into one and normalized, as the head takes it.

    Args:
        mix: transformers' module that weighs the streams (hc_head).
        norm: transformers' norm.
    """

    def __init__(self, mix: Any, norm: Any) -> None:
        super().__init__()
        self.mix, self.norm = mix, norm

    def forward(self, streams: Tensor) -> Tensor:
        """Return [n, hidden] of [n, streams x hidden]."""
        out: Tensor = self.norm(self.mix(streams.unflatten(1, (self.mix.hc_mult, -1))[None]))
        return out[0]


def take_collapse(model: Any) -> Collapse:
    """Take what comes after its layers off transformers' model of DeepSeek-V4, so that it returns all streams."""
    collapse = Collapse(model.hc_head, model.norm)
    model.hc_head, model.norm = nn.Identity(), nn.Identity()
    return collapse


class StreamMtpLayer(nn.Module):
    """DeepSeek-V4's MTP module: a decoder layer over the sum of two projections, of the embedding of the token that
    follows, for all streams alike, and of each stream. `dcpmla.model.mtp.MtpLayer` says what for.

    Args:
        embedding: [vocab, hidden], the model's.
        embedding_norm, hidden_norm: weights [hidden] (enorm, hnorm).
        projections: [hidden, hidden] of embeddings and of streams (e_proj, h_proj), whole on each rank.
        block: transformers' decoder layer around this package's parts, with a window alone.
        collapse: of what the block gives.
    Attributes:
        width: columns of the hidden states that it takes and gives: all streams.
    Source: the code published with DeepSeek-V4 (inference/model.py, MTPBlock).
    """

    def __init__(
        self,
        embedding: Tensor,
        embedding_norm: Tensor,
        hidden_norm: Tensor,
        projections: tuple[Linear, Linear],
        block: Any,
        collapse: Collapse,
        eps: float,
    ) -> None:
        super().__init__()
        self.embedding, self.embedding_norm, self.hidden_norm = embedding, embedding_norm, hidden_norm
        self.of_embedding, self.of_stream = projections
        self.block, self.collapse, self.eps = block, collapse, eps
        self.num_streams = collapse.mix.hc_mult
        self.width = self.num_streams * embedding.shape[1]

    def join(self, token_ids: Tensor, hidden_states: Tensor) -> Tensor:
        """Return the rows [T, hidden + width] that `forward` takes: embeddings of tokens [T], then hidden states
        [T, width] of the positions before them.
        """
        return torch.cat([nn.functional.embedding(token_ids, self.embedding), hidden_states], -1)

    def forward(self, rows: Tensor, cache: AnyCache | None, step: StepMetadata | None) -> Tensor:
        """Return the hidden states [T, width] of rows [T, hidden + width]. Collective over the TP group."""
        embedded, streams = rows.split([rows.shape[1] - self.width, self.width], -1)
        embedded = self.of_embedding(rms_norm(embedded.contiguous(), self.embedding_norm, self.eps))
        streams = streams.reshape(-1, embedded.shape[1])
        streams = self.of_stream(rms_norm(streams, self.hidden_norm, self.eps)).unflatten(0, (-1, self.num_streams))
        out: Tensor = self.block((embedded[:, None] + streams)[None], step=step, latent_cache=cache)
        return out[0].flatten(1)
