"""An EAGLE3 head: a decoder layer that drafts from hidden states of several of the model's layers."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.layers import Cache
from dcpmla.comm.norm import norm_rows
from dcpmla.model.block import DecoderBlock, VocabHead
from dcpmla.parallel.linear import Linear
from dcpmla.parallel.quantized import plain


class Eagle3Head(nn.Module):
    """A head over the draft's vocabulary, which may be a part of the model's.

    Args:
        head: Head over the draft's vocabulary.
        offsets: Offset from each draft's number to the model's token (d2t), int64 [draft vocab]; None if the
            vocabularies are equal.
    """

    offsets: Tensor | None

    def __init__(self, head: VocabHead, offsets: Tensor | None) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("offsets", offsets)

    def best(self, x: Tensor) -> Tensor:
        """Return the model's token with the highest logit for each row of x [n, hidden], [n] int64. Collective."""
        tokens = self.head.best(x)
        return tokens if self.offsets is None else tokens + self.offsets[tokens]


class Eagle3Layer(nn.Module):
    """A decoder layer that drafts one token after another.

    At position p it takes the embedding of token p + 1 beside a hidden state of position p, both normalized, and
    drafts token p + 2. The hidden state is a projection of the model's where the model has computed position p, and
    else the layer's own output for the position before.

    Args:
        embedding: [vocab, hidden], the model's or the head's own.
        projection: [hidden, width] of the model's hidden states side by side (fc), whole on each rank.
        part_norms: Weights of norms of each of the model's hidden states (fc_norm); empty without.
        input_norms: Weights [hidden] of the norms of embeddings and of hidden states (input_layernorm, hidden_norm).
        block: Block whose attention takes both side by side, and whose output_norm is the norm before the head.
        norms_residual: Whether the residual is the normalized hidden state (norm_before_residual).
        norms_output: Whether the layer's own hidden states are normalized (norm_output, EAGLE 3.1).
    Attributes:
        width: Columns of the model's hidden states.
    Source: EAGLE-3 (Li et al., 2025), and the heads published for Kimi-K2.5.
    """

    def __init__(
        self,
        embedding: Tensor,
        projection: Linear,
        part_norms: Sequence[Tensor],
        input_norms: tuple[Tensor, Tensor],
        block: DecoderBlock,
        head: Eagle3Head,
        norms_residual: bool,
        norms_output: bool,
    ) -> None:
        super().__init__()
        self.embedding, self.projection, self.width = embedding, projection, projection.in_features
        self.part_norms, self.input_norms = (
            nn.ParameterList([nn.Parameter(norm, requires_grad=False) for norm in norms])
            for norms in (part_norms, input_norms)
        )
        self.block, self.head, self.eps = block, head, block.eps
        self.norms_residual, self.norms_output = norms_residual, norms_output

    def project(self, hidden_states: Tensor) -> Tensor:
        """Return hidden states [T, hidden] for the model's [T, width]."""
        if self.part_norms:
            parts = zip(hidden_states.chunk(len(self.part_norms), -1), self.part_norms, strict=True)
            hidden_states = torch.cat(
                [norm_rows(part.contiguous(), norm, self.eps, False)[0] for part, norm in parts], -1
            )
        projected: Tensor = self.projection(hidden_states)
        return projected

    def forward(self, rows: Tensor, cache: Cache | None, step: StepMetadata | None) -> Tensor:
        """Return hidden states [T, hidden] for rows [T, 2 hidden] (`DraftModel.rows`). Collective."""
        embedded, residual = (part.contiguous() for part in rows.chunk(2, -1))
        embedding_norm, hidden_norm = self.input_norms
        normed = norm_rows(residual, hidden_norm, self.eps, False)[0]
        x = torch.cat([norm_rows(embedded, embedding_norm, self.eps, False)[0], normed], -1)
        x, residual = self.block(x, normed if self.norms_residual else residual, cache, step)
        return plain(x) if self.norms_output else residual

    def collapse(self, hidden_states: Tensor) -> Tensor:
        """Return hidden states [n, hidden] as the head takes them."""
        if self.norms_output:
            return hidden_states
        return norm_rows(hidden_states, self.block.output_norm, self.eps, False)[0]
