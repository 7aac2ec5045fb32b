"""The decoder: embedding, blocks of attention and an MLP or experts, and the head over the vocabulary."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dcpmla.attention.spec import AttentionLayer
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.layers import Cache
from dcpmla.comm.calls import NormedSum
from dcpmla.comm.norm import add_norm, norm_rows
from dcpmla.comm.reduce import Reduce
from dcpmla.comm.terms import Terms, whole
from dcpmla.model.mlp import MLP
from dcpmla.model.moe import MoE
from dcpmla.model.norm_gate import NormGate
from dcpmla.parallel.by_rows import by_rows
from dcpmla.parallel.collectives import all_gather
from dcpmla.parallel.linear import Linear
from dcpmla.parallel.quantized import NormedRows, PlainRows, plain


class DecoderBlock(nn.Module):
    """Attention, then an MLP or experts. One kernel sums each output over the TP group, adds it and normalizes.

    Args:
        layer: Number of the layer in the cache.
        attention_norm: Weight [hidden] of the norm before the MLP (post_attention_layernorm).
        output_norm: Weight [hidden] of the norm that follows the block: the next block's input_layernorm, or the
            model's last.
        reduce: Sums over the TP group.
        mlp_norm: Weight [hidden] of a norm of the MLP's summed output (A.X-K1's experts); None without.
        input_gate, mlp_gate: Gates of the rows that attention and the MLP take (A.X-K2); None without.
    Attributes:
        quantizes_output: Whether the next block takes its input in fp8 too.
    """

    def __init__(
        self,
        layer: int,
        attention: AttentionLayer,
        mlp: MLP | MoE,
        attention_norm: Tensor,
        output_norm: Tensor,
        eps: float,
        reduce: Reduce,
        mlp_norm: Tensor | None = None,
        input_gate: NormGate | None = None,
        mlp_gate: NormGate | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.attention, self.mlp, self.reduce, self.eps = layer, attention, mlp, reduce, eps
        self.input_gate, self.mlp_gate, self.quantizes_output = input_gate, mlp_gate, False
        self.attention_norm = nn.Parameter(attention_norm, requires_grad=False)
        self.output_norm = nn.Parameter(output_norm, requires_grad=False)
        self.mlp_norm = None if mlp_norm is None else nn.Parameter(mlp_norm, requires_grad=False)

    @property
    def takes_quantized(self) -> bool:
        """True if quantized rows save work."""
        return self.attention.takes_quantized and self.input_gate is None

    def forward(
        self, x: PlainRows, residual: Tensor, cache: Cache | None, step: StepMetadata | None
    ) -> tuple[PlainRows, Tensor]:
        """Run one step of a batch. Collective over the TP group.

        Args:
            x: [T, hidden], normalized.
            residual: [T, hidden], the sum so far.
            cache: Cache of the model; None, like step, where memory is measured.
        Returns:
            x and residual for the next block.
        """
        if self.input_gate is not None:
            x = self.input_gate(plain(x), self.attention.takes_quantized)
        attended = self.attention.partial(x, None if cache is None else cache[self.layer], step)
        quantizes = self.mlp.takes_quantized and self.mlp_gate is None
        x, residual = self.reduce.add_norm(attended, residual, self.attention_norm, self.eps, quantizes)
        added = self.mlp(x if self.mlp_gate is None else self.mlp_gate(plain(x), self.mlp.takes_quantized))
        if self.mlp_norm is None:
            return self.reduce.add_norm(added, residual, self.output_norm, self.eps, self.quantizes_output)
        # The zero residual adds nothing: the sum over the ranks and its norm are one kernel.
        added, _ = self.reduce.add_norm(added, torch.zeros_like(residual), self.mlp_norm, self.eps)
        call = NormedSum(Terms(plain(added)), residual, self.output_norm, self.eps, self.quantizes_output)
        normed, residual, *codes = add_norm(call)
        return NormedRows.join(normed, *codes), residual


class ShortcutBlock(nn.Module):
    """LongCat's block: attention and an MLP, twice, and experts between the first norm and the end, so that one sum
    over the ranks covers their output and the second MLP's.

    Args:
        layer: Number of the first attention in the cache; the second one's is the next.
        norms: Weights [hidden] of the norms after the first attention, the first MLP, the second attention, and of the
            norm that follows the block.
    Attributes:
        quantizes_output: Same as in `DecoderBlock`.
    """

    def __init__(
        self,
        layer: int,
        attentions: tuple[AttentionLayer, AttentionLayer],
        mlps: tuple[MLP, MLP],
        experts: MoE,
        norms: Sequence[Tensor],
        eps: float,
        reduce: Reduce,
    ) -> None:
        super().__init__()
        self.layer, self.experts, self.reduce, self.eps = layer, experts, reduce, eps
        self.first, self.second = attentions
        self.first_mlp, self.second_mlp = mlps
        self.norms = nn.ParameterList([nn.Parameter(norm, requires_grad=False) for norm in norms])
        self.quantizes_output = False

    @property
    def takes_quantized(self) -> bool:
        """True if quantized rows save work."""
        return self.first.takes_quantized

    def forward(
        self, x: PlainRows, residual: Tensor, cache: Cache | None, step: StepMetadata | None
    ) -> tuple[PlainRows, Tensor]:
        """Run one step of a batch, like `DecoderBlock.forward`."""
        own, following = (None, None) if cache is None else (cache[self.layer], cache[self.layer + 1])
        add_norm, norms, eps = self.reduce.add_norm, self.norms, self.eps
        quantizes = self.first_mlp.takes_quantized or self.experts.takes_quantized
        x, residual = add_norm(self.first.partial(x, own, step), residual, norms[0], eps, quantizes)
        shortcut = whole(self.experts(x))
        x, residual = add_norm(self.first_mlp(x), residual, norms[1], eps, self.second.takes_quantized)
        attended = self.second.partial(x, following, step)
        x, residual = add_norm(attended, residual, norms[2], eps, self.second_mlp.takes_quantized)
        return add_norm(self.second_mlp(x) + shortcut, residual, norms[3], eps, self.quantizes_output)


class Decoder(nn.Module):
    """All layers of a model except its head.

    Args:
        embedding: [vocab, hidden].
        input_norm: Weight [hidden] of the first block's norm.
    """

    def __init__(
        self, embedding: Tensor, input_norm: Tensor, blocks: Sequence[DecoderBlock | ShortcutBlock], eps: float
    ) -> None:
        super().__init__()
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.input_norm = nn.Parameter(input_norm, requires_grad=False)
        self.blocks, self.eps = nn.ModuleList(blocks), eps
        for block, following in pairwise(blocks):
            block.quantizes_output = following.takes_quantized

    def forward(self, token_ids: Tensor, step: StepMetadata | None, cache: Cache | None) -> Tensor:
        """Return the normalized hidden states [T, hidden] of tokens [T] int64. Collective over the TP group."""
        residual = nn.functional.embedding(token_ids, self.embedding)
        x: PlainRows = norm_rows(residual, self.input_norm, self.eps, False)[0]
        for block in self.blocks:
            x, residual = block(x, residual, cache, step)
        return plain(x)

    def collapse(self, hidden_states: Tensor) -> Tensor:
        """Return hidden states [n, hidden] unchanged: the head takes them in this form."""
        return hidden_states


class VocabHead(nn.Module):
    """The head over the vocabulary, its rows cut over the TP group if they divide evenly.

    Args:
        linear: Rows of this rank.
        vocab_size: Size of the whole vocabulary.
        softcap: Bound c of the logits, which are c tanh(logit / c); None without.
    """

    def __init__(self, linear: Linear, vocab_size: int, group: ProcessGroup, softcap: float | None = None) -> None:
        super().__init__()
        self.linear, self.vocab_size, self.group, self.softcap = linear, vocab_size, group, softcap

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [n, vocab] float32 of x [n, hidden], the same on every rank. Collective."""
        logits = self._gathered(self.linear(x))
        if self.softcap is None:
            return logits
        return by_rows(self._bound, logits) if self.linear.is_deterministic else self._bound(logits)

    def _bound(self, logits: Tensor) -> Tensor:
        assert self.softcap is not None
        return logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def _gathered(self, logits: Tensor) -> Tensor:
        if logits.shape[1] == self.vocab_size:
            return logits.float()
        gathered = all_gather(logits, self.group, "gathering logits").transpose(0, 1)
        return gathered.to(torch.float32, memory_format=torch.contiguous_format).flatten(1)

    def best(self, x: Tensor) -> Tensor:
        """Return the token with the highest logit for each row of x [n, hidden], the lowest id among ties, [n] int64.
        Each rank sends its best logit alone, without a softcap, which keeps the order. Collective.
        """
        return self.best_of(self.linear(x))

    def best_of(self, logits: Tensor) -> Tensor:
        """Return `best` of the logits of this rank's part of the vocabulary [n, rows]. Collective."""
        values, tokens = logits.max(-1)
        if logits.shape[1] == self.vocab_size:
            return tokens
        tokens += dist.get_rank(self.group) * logits.shape[1]
        # float64 holds both exactly.
        found = all_gather(torch.stack([values.double(), tokens.double()]), self.group, "gathering the best tokens")
        rank = found[:, 0].argmax(0, keepdim=True)
        return found[:, 1].gather(0, rank).squeeze(0).long()
