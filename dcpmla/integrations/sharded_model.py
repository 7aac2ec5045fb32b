"""A model under TP x DCP as the engine runs it."""

import functools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dcpmla.attention.placement import Placement
from dcpmla.attention.stack import Stack
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.layers import Cache
from dcpmla.comm.reduce import Reduce
from dcpmla.model.block import Decoder, VocabHead
from dcpmla.model.mtp import MtpLayer
from dcpmla.model.stream_decoder import StreamDecoder, StreamMtpLayer
from dcpmla.model.sum_decoder import SumDecoder
from dcpmla.parallel.by_rows import by_rows

DecoderModule = Decoder | StreamDecoder | SumDecoder  # all layers of a model but its head
MtpModule = MtpLayer | StreamMtpLayer


class ShardedModel:
    """A causal language model whose attention runs under TP x DCP.

    Args:
        hidden_states: Decoder; step and cache are None where only memory is claimed.
        head: Function of normalized hidden states [n, hidden] that returns logits [n, vocab] float32.
        rotary: Rotary embedding of transformers.
        placement: Placement of the layers.
        reduce: Sums over the TP ranks.
        mtp: MTP module; None for a model that does not draft with it.
    Attributes:
        attention: Attention of all layers.
        hidden_rows: [N, width] hidden states of the last step, kept for the MTP module; empty without one.
        placement: Placement of the layers.
        eos_token_ids, vocab_size, dtype, device: Values of the model.
    """

    def __init__(
        self,
        hidden_states: DecoderModule,
        head: VocabHead,
        rotary: Any,
        attention: Stack,
        placement: Placement,
        reduce: Reduce,
        eos_token_ids: frozenset[int],
        mtp: MtpModule | None = None,
    ) -> None:
        self._mtp = mtp
        self.placement, self.dtype, self.device = placement, placement.dtype, torch.device(placement.device)
        self.hidden_rows = torch.empty(0, device=self.device)
        self.hidden_states, self.head, self._rotary = hidden_states, head, rotary
        self._exchanges = placement.exchange, reduce
        self.attention, self.eos_token_ids, self.vocab_size = attention, eos_token_ids, head.vocab_size

    @torch.inference_mode()
    def hidden(self, token_ids: Tensor, metadata: StepMetadata | None, cache: Cache | None) -> Tensor:
        """Run all layers over one step of a flat batch. Collective over the TP group.

        Args:
            token_ids: Tokens of the step [T], int64.
            metadata, cache: Metadata of the step, and the cache that it reads and writes; None in a profile.
        Returns:
            Hidden states [T, width] for `logits`.
        """
        prepared = None if metadata is None else self.prepare(metadata)
        hidden_states = self.hidden_states(token_ids, prepared, cache)
        if self._mtp is not None:
            self.hidden_rows[: len(hidden_states)].copy_(hidden_states)
        return hidden_states

    @torch.inference_mode()
    def logits(self, hidden_states: Tensor) -> Tensor:
        """Return logits [n, vocab] float32 of hidden states [n, width], the same on every rank. Collective."""
        logits: Tensor = self.head(self.hidden_states.collapse(hidden_states))
        return logits

    @torch.inference_mode()
    def decode(self, token_ids: Tensor, metadata: StepMetadata, cache: Cache) -> Tensor:
        """Run one step for a `StepGraph`: logits of all rows, without reading results on the host. Collective over
        the TP group.

        Args:
            token_ids: [T] int64, one per request.
        Returns:
            [T, vocab] float32, the same on every rank.
        """
        return self.logits(self.hidden(token_ids, metadata, cache))

    def keep_hidden_states(self, num_tokens: int) -> None:
        """Keep the hidden states of steps of at most num_tokens tokens for the MTP module."""
        assert self._mtp is not None
        self.hidden_rows = torch.zeros(num_tokens, self._mtp.width, dtype=self.dtype, device=self.device)

    def join(self, token_ids: Tensor, hidden_states: Tensor) -> Tensor:
        """Return rows for `predict`: embeddings of tokens [T], then hidden states [T, width] of the positions before
        them.
        """
        assert self._mtp is not None
        return torch.cat([nn.functional.embedding(token_ids, self._mtp.embedding), hidden_states], -1)

    @torch.inference_mode()
    def predict(self, rows: Tensor, metadata: StepMetadata, cache: Cache) -> Tensor:
        """Run the MTP module over rows of `join`: return its hidden states [T, width]. Collective over the TP group."""
        assert self._mtp is not None
        return self._mtp(rows, cache, self.prepare(metadata, (self.attention.num_layers - 1,)))

    @torch.inference_mode()
    def draft(self, hidden_states: Tensor, metadata: StepMetadata, cache: Cache) -> Tensor:
        """Draft tokens one by one, for a `StepGraph`: each request's first from a hidden state of the MTP module,
        each other from the module's output for the previous draft. Collective over the TP group.

        Args:
            hidden_states: [n k, width], k rows per request; the first is the module's at the last token that it has
                computed, the others are ignored.
            metadata: Step of n requests with k tokens each, that last one and k - 1 drafts.
        Returns:
            [n k] int64, request after request.
        """
        assert metadata.decode is not None
        assert self._mtp is not None
        num_drafts = metadata.decode.max_query_len
        hidden_states = hidden_states[::num_drafts].clone(memory_format=torch.contiguous_format)
        drafts = [self.head.best(self._mtp.collapse(hidden_states))]
        for index in range(1, num_drafts):
            rows = self.join(drafts[-1], hidden_states)
            hidden_states = self.predict(rows, metadata.nth_token(index), cache)
            drafts.append(self.head.best(self._mtp.collapse(hidden_states)))
        return torch.stack(drafts, 1).flatten()

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Leave out layers that launch the same kernels as an earlier one: the first stays, and one of each sort of the
        others.
        """
        blocks = self.hidden_states.blocks
        sorts = {self._sort(block): block for block in reversed(blocks[1:])}
        kept = {id(block) for block in (blocks[0], *sorts.values())}
        self.hidden_states.blocks = nn.ModuleList(block for block in blocks if id(block) in kept)
        try:
            yield
        finally:
            self.hidden_states.blocks = blocks

    def _sort(self, block: Any) -> Hashable:
        """Return what the kernels of a block depend on: its attention, its modules, the sizes of its weights."""
        weights = (*block.named_parameters(), *block.named_buffers())
        return (
            self.attention.layers[block.layer],
            getattr(block, "quantizes_output", False),
            *((name, type(module)) for name, module in block.named_modules()),
            *((name, weight.shape, weight.dtype) for name, weight in weights),
        )

    def modules(self) -> list[nn.Module]:
        """Return the modules that have the model's weights."""
        return [part for part in vars(self).values() if isinstance(part, nn.Module)]

    def check(self) -> None:
        """Raise the faults of exchanges in steps whose results are on the host (`Exchange.check`)."""
        for exchange in self._exchanges:
            exchange.check()

    @property
    def faults(self) -> list[Tensor]:
        """Return the words in which kernels report a timeout (`Exchange.fault`)."""
        return [exchange.fault for exchange in self._exchanges if exchange.fault is not None]

    @torch.inference_mode()
    def profile(self, num_tokens: int, num_logits: int = 1) -> None:
        """Run dummy tokens without a cache, so that the allocator's peak shows what the largest step needs.
        Collective over the TP group.

        All tokens are equal, so they go to the same experts: no step of that many tokens loads an expert more.
        Attention claims its memory and computes nothing (`MLAAttention.touch_peak_memory`).

        Args:
            num_logits: Limit of a step's rows with logits, one per request.
        """
        token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        shared = self.attention.touch_peak_memory(num_tokens, self.device)
        self.logits(self.hidden(token_ids, None, None)[:num_logits])
        if self._mtp is not None:
            self._mtp(self.join(token_ids, self.hidden_rows[:num_tokens]), None, None)
        del shared  # a step holds it during the whole pass

    def prepare(self, metadata: StepMetadata, layers: Sequence[int] | None = None) -> StepMetadata:
        """Return a step with what its layers share; layers None for all."""
        return self.attention.prepare(metadata, self._cos_sin, self.dtype, layers)

    def _cos_sin(self, positions: Tensor, layer_type: str) -> Tensor:
        """Return the angles [T, R] float32 of `apply_rope` at positions [T], by the model's own rotary embedding (YaRN
        and all other kinds).

        Args:
            layer_type: Type of rotary embedding, in a model with several.
        """
        angles = functools.partial(self._angles, layer_type=layer_type)
        rows: Tensor = by_rows(angles, positions) if self.placement.dcp.deterministic else angles(positions)
        return rows

    def _angles(self, positions: Tensor, layer_type: str) -> Tensor:
        x = torch.empty(0, dtype=torch.float32, device=self.device)
        types = {"layer_type": layer_type} if hasattr(self._rotary, "layer_types") else {}
        rotary: Any = self._rotary(x, positions[None], **types)
        if isinstance(rotary, Tensor):  # DeepSeek-V2 rotates complex numbers
            return torch.cat([rotary[0].real, rotary[0].imag], -1)
        # Each angle once: most models repeat them for the second half.
        half = self.attention.config.rope_dim // 2
        return torch.cat([part[0, :, :half] for part in rotary], -1)
