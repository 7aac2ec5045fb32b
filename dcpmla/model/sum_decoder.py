"""Kimi-K3's decoder: blocks whose parts take mixtures of sums of outputs (attention residuals)."""

from collections.abc import Sequence

from torch import Tensor, nn

from dcpmla.attention.spec import AttentionLayer
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.layers import Cache
from dcpmla.comm.reduce import Reduce
from dcpmla.model.calls import Sums
from dcpmla.model.mlp import MLP
from dcpmla.model.moe import MoE
from dcpmla.model.sums import Mixer


class SumBlock(nn.Module):
    """Attention, then an MLP or experts, each over a mixture of sums.

    Args:
        layer: Number of the layer in the cache.
        mixers: Mixtures before attention and before the MLP.
        reduce: Sums over the TP group.
    """

    def __init__(
        self, layer: int, attention: AttentionLayer, mlp: MLP | MoE, mixers: tuple[Mixer, Mixer], reduce: Reduce
    ) -> None:
        super().__init__()
        self.layer, self.attention, self.mlp, self.reduce = layer, attention, mlp, reduce
        self.to_attention, self.to_mlp = mixers

    def forward(self, sums: Sums, cache: Cache | None, step: StepMetadata | None) -> Sums:
        """Run one step of a batch. Collective over the TP group.

        Args:
            cache: Cache of the model; None, like step, where memory is measured.
        """
        x, sums = self.to_attention(sums)
        attended = self.attention.partial(x, None if cache is None else cache[self.layer], step)
        x, sums = self.to_mlp(sums.add(self.reduce.all_reduce(attended)))
        return sums.add(self.reduce.all_reduce(self.mlp(x)))


class SumDecoder(nn.Module):
    """All layers of a model except its head.

    Args:
        embedding: Weight [vocab, hidden].
        to_head: Mixture before the head.
    """

    def __init__(self, embedding: Tensor, blocks: Sequence[SumBlock], to_head: Mixer) -> None:
        super().__init__()
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.blocks, self.to_head = nn.ModuleList(blocks), to_head
        self.num_groups = sum(block.to_attention.stores for block in blocks)

    def forward(self, token_ids: Tensor, step: StepMetadata | None, cache: Cache | None) -> Tensor:
        """Return the normalized hidden states [T, hidden] of tokens [T] int64. Collective over the TP group."""
        embedded = nn.functional.embedding(token_ids, self.embedding)
        sums = Sums(embedded.new_empty(self.num_groups, *embedded.shape), 0, embedded)
        for block in self.blocks:
            sums = block(sums, cache, step)
        x: Tensor = self.to_head(sums)[0]
        return x

    def collapse(self, hidden_states: Tensor) -> Tensor:
        """Return hidden states [n, hidden] unchanged: the head takes them in this form."""
        return hidden_states
