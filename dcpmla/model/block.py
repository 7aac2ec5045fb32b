"""The decoder: embedding, blocks of attention and an MLP or experts, and the head over the vocabulary."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dcpmla.attention.layer import MLAAttention
from dcpmla.attention.step import StepMetadata
from dcpmla.cache.latent import LatentCache, LayerCache
from dcpmla.comm.reduce import Reduce, rms_norm
from dcpmla.model.mlp import MLP
from dcpmla.model.moe import MoE
from dcpmla.parallel.collectives import all_gather
from dcpmla.parallel.fp8 import PlainRows, plain
from dcpmla.parallel.linear import Linear


class DecoderBlock(nn.Module):
    """Attention, then an MLP or experts. What each adds is summed over the TP group, added and normalized in one
    kernel.

    Args:
        attention_norm: weight [hidden] of the norm before the MLP (post_attention_layernorm).
        output_norm: weight [hidden] of the norm that follows the block: the next block's input_layernorm, or the
            model's last.
        reduce: sums over the TP group.
    Attributes:
        quantizes_output: whether the next block takes its input in fp8 too.
    """

    def __init__(
        self,
        attention: MLAAttention,
        mlp: MLP | MoE,
        attention_norm: Tensor,
        output_norm: Tensor,
        eps: float,
        reduce: Reduce,
    ) -> None:
        super().__init__()
        self.attention, self.mlp, self.reduce, self.eps = attention, mlp, reduce, eps
        self.quantizes_output = False
        self.attention_norm = nn.Parameter(attention_norm, requires_grad=False)
        self.output_norm = nn.Parameter(output_norm, requires_grad=False)

    def forward(
        self, x: PlainRows, residual: Tensor, cache: LayerCache | None, step: StepMetadata | None
    ) -> tuple[PlainRows, Tensor]:
        """Run one step of a batch. Collective over the TP group.

        Args:
            x: [T, hidden], normalized.
            residual: [T, hidden], the sum so far.
            cache: the block's; None, like step, where only memory is claimed.
        Returns:
            x and residual for the next block.
        """
        attended = self.attention.partial(x, cache, step)
        quantizes = self.mlp.takes_quantized
        x, residual = self.reduce.add_norm(attended, residual, self.attention_norm, self.eps, quantizes)
        return self.reduce.add_norm(self.mlp(x), residual, self.output_norm, self.eps, self.quantizes_output)


class Decoder(nn.Module):
    """All layers of a model but its head.

    Args:
        embedding: [vocab, hidden].
        input_norm: weight [hidden] of the first block's norm.
    """

    def __init__(self, embedding: Tensor, input_norm: Tensor, blocks: Sequence[DecoderBlock], eps: float) -> None:
        super().__init__()
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.input_norm = nn.Parameter(input_norm, requires_grad=False)
        self.blocks, self.eps = nn.ModuleList(blocks), eps
        for block, following in pairwise(blocks):
            block.quantizes_output = following.attention.takes_quantized

    def forward(self, token_ids: Tensor, step: StepMetadata | None, cache: LatentCache | None) -> Tensor:
        """Return the normalized hidden states [T, hidden] of tokens [T] int64. Collective over the TP group."""
        residual = nn.functional.embedding(token_ids, self.embedding)
        x: PlainRows = rms_norm(residual, self.input_norm, self.eps)
        for layer, block in enumerate(self.blocks):
            x, residual = block(x, residual, None if cache is None else cache[layer], step)
        return plain(x)


class VocabHead(nn.Module):
    """The head over the vocabulary, its rows cut over the TP group where they divide.

    Args:
        linear: this rank's rows.
        vocab_size: all of them.
    """

    def __init__(self, linear: Linear, vocab_size: int, group: ProcessGroup) -> None:
        super().__init__()
        self.linear, self.vocab_size, self.group = linear, vocab_size, group

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [n, vocab] float32 of x [n, hidden], the same on every rank. Collective."""
        logits: Tensor = self.linear(x)
        if logits.shape[1] == self.vocab_size:
            return logits.float()
        gathered = all_gather(logits, self.group, "gathering logits").transpose(0, 1)
        return gathered.to(torch.float32, memory_format=torch.contiguous_format).flatten(1)

    def best(self, x: Tensor) -> Tensor:
        """Return the token with the highest logit after each of x [n, hidden], the lowest of several, [n] int64: of
        each rank's rows one logit travels, not all. Collective.
        """
        logits: Tensor = self.linear(x)
        values, tokens = logits.max(-1)
        if logits.shape[1] == self.vocab_size:
            return tokens
        tokens += dist.get_rank(self.group) * logits.shape[1]
        # float64 holds both exactly.
        found = all_gather(torch.stack([values.double(), tokens.double()]), self.group, "gathering the best tokens")
        rank = found[:, 0].argmax(0, keepdim=True)
        return found[:, 1].gather(0, rank).squeeze(0).long()
