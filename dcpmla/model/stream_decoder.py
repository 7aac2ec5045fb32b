"""The decoder of DeepSeek-V4, V4.1, HY V4 and GLM-5-Next, blocks over several streams, and DeepSeek-V4's MTP module."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dcpmla.attention.spec import AttentionLayer
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.layers import Cache
from dcpmla.comm.norm import rms_norm
from dcpmla.comm.reduce import Reduce
from dcpmla.model.memory import NgramMemory
from dcpmla.model.mixing import Streams
from dcpmla.model.mlp import MLP
from dcpmla.model.moe import MoE
from dcpmla.model.ngrams import NgramHash
from dcpmla.model.streams import Connection, DelayedCollapse, StreamMean, finish
from dcpmla.parallel.linear import Linear
from dcpmla.parallel.quantized import plain


class StreamBlock(nn.Module):
    """Attention, then an MLP or experts, each over a hyper-connection.

    Args:
        layer: Number of the layer in the cache.
        connections: Connections before attention and before the MLP.
        reduce: Sums over the TP group.
        memory: Memory of n-grams, which is added to the streams before attention (`recall`); None without.
    """

    def __init__(
        self,
        layer: int,
        attention: AttentionLayer,
        mlp: MLP | MoE,
        connections: tuple[Connection, Connection],
        reduce: Reduce,
        memory: NgramMemory | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.attention, self.mlp, self.reduce = layer, attention, mlp, reduce
        self.to_attention, self.to_mlp = connections
        self.memory = memory

    def recall(self, streams: Streams, hashes: Tensor | None) -> Streams:
        """Return the streams with the memory added, if there is one.

        Args:
            hashes: [L, T, C] int32 (`NgramHash`); None without memories.
        """
        if self.memory is None:
            return streams
        assert hashes is not None
        recalled: Streams = self.memory(streams, hashes)
        return recalled

    def forward(
        self, streams: Streams, token_ids: Tensor | None, cache: Cache | None, step: StepMetadata | None
    ) -> Streams:
        """Run one step of a batch. Collective over the TP group.

        Args:
            token_ids: [T] int64, for gates that read them.
            cache: Cache of the model; None, like step, where memory is measured.
        """
        x, streams = self.to_attention(streams, self.attention.takes_quantized)
        attended = self.attention.partial(x, None if cache is None else cache[self.layer], step)
        streams = streams._replace(out=self.reduce.all_reduce(attended))
        x, streams = self.to_mlp(streams, self.mlp.takes_quantized)
        added = self.mlp(x, token_ids) if isinstance(self.mlp, MoE) else self.mlp(x)
        return streams._replace(out=self.reduce.all_reduce(added))


class StreamTap(NamedTuple):
    """The use that a module which drafts makes of a decoder's streams, in every step.

    Attributes:
        layers: Ascending numbers of layers whose inputs it takes, after their memories; the number of all layers is the
            output of the last.
        take: Function of the means of the streams there, side by side [T, n hidden], of a cache and a step.
    """

    layers: tuple[int, ...]
    take: Callable[[Tensor, Cache | None, StepMetadata | None], None]


class StreamDecoder(nn.Module):
    """All layers of a model except its head.

    Args:
        embedding: Weight [vocab, hidden], without a gradient.
        num_streams: Number of streams of the residual, which all begin as the embedding.
        to_head: Collapse of the streams.
        collapses: Whether the hidden states are collapsed already, as HY V4's MTP module takes them; always with a
            `DelayedCollapse`, whose weights come from the last layer.
        ngrams: Hashes for the blocks' memories; None without.
    Attributes:
        tap: Use that a module which drafts makes of the streams; None without, as at first.
    """

    tap: StreamTap | None = None

    def __init__(
        self,
        embedding: nn.Parameter,
        blocks: Sequence[StreamBlock],
        num_streams: int,
        to_head: Connection | StreamMean | DelayedCollapse,
        collapses: bool = False,
        ngrams: NgramHash | None = None,
    ) -> None:
        super().__init__()
        self.ngrams = ngrams
        self.embedding, self.collapses = embedding, collapses
        self.blocks, self.num_streams, self.to_head = nn.ModuleList(blocks), num_streams, to_head

    def forward(self, token_ids: Tensor, step: StepMetadata | None, cache: Cache | None) -> Tensor:
        """Return all streams [T, streams x hidden] of tokens [T] int64, or their collapse [T, hidden]. Collective over
        the TP group.
        """
        embedded = nn.functional.embedding(token_ids, self.embedding)
        streams = Streams(embedded[:, None].repeat(1, self.num_streams, 1))
        hashes = None if self.ngrams is None else self.ngrams(token_ids, step, cache)
        tapped, means = () if self.tap is None else self.tap.layers, dict[int, Tensor]()
        block: Any
        for number, block in enumerate(self.blocks):
            streams = block.recall(streams, hashes)
            if number in tapped:
                means[number] = finish(streams).mean(1)
            streams = block(streams, token_ids, cache, step)
        if len(self.blocks) in tapped:
            means[len(self.blocks)] = finish(streams).mean(1)
        if self.tap is not None:
            self.tap.take(torch.cat([means[number] for number in tapped], -1), cache, step)
        return plain(self.to_head(streams)[0]) if self.collapses else finish(streams).flatten(1)

    def collapse(self, hidden_states: Tensor) -> Tensor:
        """Return hidden states [n, width] as the head takes them, [n, hidden]."""
        if self.collapses or isinstance(self.to_head, DelayedCollapse):
            return hidden_states
        return self.to_head.collapse(hidden_states)


class StreamMtpLayer(nn.Module):
    """DeepSeek-V4's MTP module: a block over the sum of two projections, of the next token's embedding, for all streams
    alike, and of each stream. `dcpmla.model.mtp.MtpLayer` documents its purpose.

    Args:
        embedding: [vocab, hidden], the model's.
        embedding_norm, hidden_norm: Weights [hidden] (enorm, hnorm).
        projections: [hidden, hidden] of embeddings and of streams (e_proj, h_proj), whole on each rank.
        block: Block whose attention has only a window.
        to_head: Collapse of its streams.
    Attributes:
        width: Columns of its input and output hidden states: all streams.
    Source: the code published with DeepSeek-V4 (inference/model.py, MTPBlock).
    """

    def __init__(
        self,
        embedding: Tensor,
        embedding_norm: Tensor,
        hidden_norm: Tensor,
        projections: tuple[Linear, Linear],
        block: StreamBlock,
        to_head: Connection,
        num_streams: int,
        eps: float,
    ) -> None:
        super().__init__()
        self.embedding, self.embedding_norm, self.hidden_norm = embedding, embedding_norm, hidden_norm
        self.of_embedding, self.of_stream = projections
        self.block, self.to_head, self.num_streams, self.eps = block, to_head, num_streams, eps
        self.width = num_streams * embedding.shape[1]

    def forward(self, rows: Tensor, cache: Cache | None, step: StepMetadata | None) -> Tensor:
        """Return the hidden states [T, width] of rows [T, hidden + width] (`DraftModel.rows`). Collective."""
        embedded, streams = rows.split([rows.shape[1] - self.width, self.width], -1)
        embedded = self.of_embedding(rms_norm(embedded.contiguous(), self.embedding_norm, self.eps))
        streams = streams.reshape(-1, embedded.shape[1])
        streams = self.of_stream(rms_norm(streams, self.hidden_norm, self.eps)).unflatten(0, (-1, self.num_streams))
        return finish(self.block(Streams(embedded[:, None] + streams), None, cache, step)).flatten(1)

    def project(self, hidden_states: Tensor) -> Tensor:
        """Return the model's hidden states [T, width] unchanged: the module takes them in this form."""
        return hidden_states

    def collapse(self, hidden_states: Tensor) -> Tensor:
        """Return hidden states [n, width] as the head takes them, [n, hidden]."""
        return self.to_head.collapse(hidden_states)
