"""The module of multi-token prediction (MTP): a decoder layer that guesses the token after the next."""

import torch
from torch import Tensor, nn

from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.layers import Cache
from dcpmla.comm.norm import norm_rows
from dcpmla.model.block import DecoderBlock
from dcpmla.parallel.linear import Linear
from dcpmla.parallel.quantized import plain


class MtpLayer(nn.Module):
    """A decoder layer over the model's hidden states and the embeddings of the tokens that follow them.

    At position p it takes the hidden state of position p and the embedding of token p + 1; the model's own head turns
    its output into a draft of token p + 2. Its cache is one more layer of the model's.

    Args:
        embedding: [vocab, hidden], the model's, or the module's own (dots3).
        embedding_norm, hidden_norm: Weights [hidden] (enorm, hnorm).
        projection: [hidden, 2 hidden] (eh_proj), whole on each rank.
        input_norm: Weight [hidden] of the block's first norm.
        block: Block whose output_norm is the module's last.
    Attributes:
        width: Columns of its input and output hidden states.
    Source: DeepSeek-V3's report, section 2.2.
    """

    def __init__(
        self,
        embedding: Tensor,
        embedding_norm: Tensor,
        hidden_norm: Tensor,
        projection: Linear,
        input_norm: Tensor,
        block: DecoderBlock,
        eps: float,
    ) -> None:
        super().__init__()
        self.embedding, self.width = embedding, embedding.shape[1]
        self.norms = nn.ParameterList(
            [nn.Parameter(norm, requires_grad=False) for norm in (embedding_norm, hidden_norm, input_norm)]
        )
        self.projection, self.block, self.eps = projection, block, eps

    def forward(self, rows: Tensor, cache: Cache | None, step: StepMetadata | None) -> Tensor:
        """Return the normalized hidden states [T, hidden] of rows [T, 2 hidden] (`DraftModel.rows`). Collective."""
        embedding_norm, hidden_norm, input_norm = self.norms
        embedded, hidden_states = (part.contiguous() for part in rows.chunk(2, -1))
        normalized = (
            norm_rows(rows, norm, self.eps, False)[0]
            for rows, norm in ((embedded, embedding_norm), (hidden_states, hidden_norm))
        )
        residual = self.projection(torch.cat(tuple(normalized), -1))
        x, _ = self.block(norm_rows(residual, input_norm, self.eps, False)[0], residual, cache, step)
        return plain(x)

    def project(self, hidden_states: Tensor) -> Tensor:
        """Return the model's hidden states [T, hidden] unchanged: the module takes them in this form."""
        return hidden_states

    def collapse(self, hidden_states: Tensor) -> Tensor:
        """Return hidden states [n, hidden] unchanged: the head takes them in this form."""
        return hidden_states
