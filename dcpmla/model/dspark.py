"""DSpark: a module that drafts a block of tokens in one pass, over a context that the model's hidden states leave."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.layers import Cache
from dcpmla.comm.norm import norm_rows
from dcpmla.model.block import VocabHead
from dcpmla.model.stream_decoder import StreamDecoder
from dcpmla.parallel.linear import Linear


class MarkovHead(nn.Module):
    """The model's head, with logits added that depend on the token before: base + W2 W1[token].

    Args:
        head: Head of the model.
        embedding: W1 [vocab, rank], whole on each rank.
        transition: W2, from rank to the rows that this rank's part of the head has.
    """

    def __init__(self, head: VocabHead, embedding: Tensor, transition: Linear) -> None:
        super().__init__()
        self.head, self.transition = head, transition
        self.embedding = nn.Parameter(embedding, requires_grad=False)

    def forward(self, x: Tensor, tokens: Tensor, num_drafts: int) -> Tensor:
        """Choose drafts from left to right, each the best after the one before it. Collective over the TP group.

        Args:
            x: Hidden states [n, at least num_drafts, hidden], after their norm.
            tokens: Tokens before the first drafts [n], int64.
        Returns:
            [n, num_drafts] int64.
        """
        base: Tensor = self.head.linear(x[:, :num_drafts].flatten(0, 1))
        drafts = list[Tensor]()
        for logits in base.unflatten(0, (len(tokens), num_drafts)).unbind(1):
            added = self.transition(F.embedding(tokens, self.embedding))
            tokens = self.head.best_of(logits.float() + added.float())
            drafts.append(tokens)
        return torch.stack(drafts, 1)


class DSpark(nn.Module):
    """Decoder layers that draft a block of tokens at once.

    Their context is injected. For each token that the model computes, `projection` makes one hidden state of the
    model's, and every layer projects it to a row of its window. A block consists of the last token and noise tokens.
    Each of these tokens sees the context's window and the whole block, and drafts the token after its own position.

    Args:
        projection: [hidden, n hidden] of the model's hidden states side by side (main_proj), whole on each rank.
        norm: Weight [hidden] of the norm after it (main_norm).
        decoder: The layers, with the model's embedding.
        head: Head of the drafts.
        noise_token: Token of the positions after the first.
        block_size: Tokens of a block.
    Source: DSpark (arXiv 2607.05147), as published in DeepSeek-V4-Flash-0731 and V4.1-Flash (`mtp.*`).
    """

    def __init__(
        self,
        projection: Linear,
        norm: Tensor,
        decoder: StreamDecoder,
        head: MarkovHead,
        noise_token: int,
        block_size: int,
        eps: float,
    ) -> None:
        super().__init__()
        self.projection, self.norm = projection, nn.Parameter(norm, requires_grad=False)
        self.decoder, self.head = decoder, head
        self.noise_token, self.block_size, self.eps = noise_token, block_size, eps

    def inject(self, rows: Tensor, cache: Cache | None, step: StepMetadata | None) -> None:
        """Write the context of a step's tokens.

        Args:
            rows: The model's hidden states [T, n hidden].
            cache, step: Cache and step of the model; None in a profile.
        """
        context, *_ = norm_rows(self.projection(rows), self.norm, self.eps, False)
        if cache is not None and step is not None:
            step.run_outside_graph(self._write, context, cache)

    def _write(self, context: Tensor, cache: Cache, step: StepMetadata) -> None:
        block: Any
        for block in self.decoder.blocks:
            block.attention.inject(context, cache[block.layer], step)

    def forward(self, tokens: Tensor, step: StepMetadata | None, cache: Cache | None, num_drafts: int) -> Tensor:
        """Draft blocks. Collective over the TP group.

        Args:
            tokens: Last token of each request, the first of its block [n], int64.
            step: Step of the blocks' tokens, decodes, the first at the position of the last token; None in a profile.
            num_drafts: Number of drafts, at most block_size.
        Returns:
            [n, num_drafts] int64.
        """
        blocks = F.pad(tokens[:, None], (0, self.block_size - 1), value=self.noise_token)
        hidden_states = self.decoder(blocks.flatten(), step, cache).unflatten(0, blocks.shape)
        drafts: Tensor = self.head(hidden_states, tokens, num_drafts)
        return drafts
