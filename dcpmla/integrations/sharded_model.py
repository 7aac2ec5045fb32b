"""A model under TP x DCP as the engine runs it."""

from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from dcpmla.attention.placement import Placement
from dcpmla.attention.stack import Stack
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.layers import Cache
from dcpmla.comm.reduce import Reduce
from dcpmla.integrations.draft_model import TrainedDrafts
from dcpmla.model.block import Decoder, VocabHead
from dcpmla.model.stream_decoder import StreamDecoder
from dcpmla.model.sum_decoder import SumDecoder
from dcpmla.parallel.by_rows import by_rows

DecoderModule = Decoder | StreamDecoder | SumDecoder  # all layers of a model but its head


class ShardedModel:
    """A causal language model whose attention runs under TP x DCP.

    Args:
        hidden_states: Decoder; step and cache are None where only memory is claimed.
        head: Function of normalized hidden states [n, hidden] that returns logits [n, vocab] float32.
        rotary: Rotary embedding of transformers.
        placement: Placement of the layers.
        reduce: Sums over the TP ranks.
    Attributes:
        attention: Attention of all layers.
        angles: Function of positions [T] and a type of rotary embedding (`cos_sin`).
        drafts: Trained module that drafts, over hidden states of the model; None without.
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
    ) -> None:
        self.drafts: TrainedDrafts | None = None
        self.placement, self.dtype, self.device = placement, placement.dtype, torch.device(placement.device)
        self.hidden_states, self.head, self._rotary = hidden_states, head, rotary
        self.angles = partial(cos_sin, rotary, attention.config.rope_dim // 2, placement)
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
        hidden_states: Tensor = self.hidden_states(token_ids, prepared, cache)
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

    def modules(self) -> list[nn.Module]:
        """Return the modules that have the model's weights."""
        own = [part for part in vars(self).values() if isinstance(part, nn.Module)]
        return own if self.drafts is None else [*own, self.drafts.module]

    def check(self) -> None:
        """Raise the faults of exchanges in steps whose results are on the host (`Exchange.check`)."""
        for exchange in self._exchanges:
            exchange.check()

    @property
    def faults(self) -> list[Tensor]:
        """Return the words in which kernels report a timeout (`Exchange.fault`)."""
        return [exchange.fault for exchange in self._exchanges if exchange.fault is not None]

    @torch.inference_mode()
    def profile(self, num_tokens: int, num_logits: int = 1) -> Tensor:
        """Run dummy tokens without a cache, so that the allocator's peak shows what the largest step needs.
        Collective over the TP group.

        All tokens are equal, so they go to the same experts: no step of that many tokens loads an expert more.
        Attention claims its memory and computes nothing (`MLAAttention.touch_peak_memory`).

        Args:
            num_logits: Limit of a step's rows with logits, at most num_tokens.
        Returns:
            Logits [num_logits, vocab] float32.
        """
        token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        shared = self.attention.touch_peak_memory(num_tokens, self.device)
        logits = self.logits(self.hidden(token_ids, None, None)[:num_logits])
        if self.drafts is not None:
            self.drafts.profile(num_tokens)
        del shared  # a step holds it during the whole pass
        return logits

    def prepare(self, metadata: StepMetadata) -> StepMetadata:
        """Return a step with what its layers share."""
        return self._own_attention.prepare(metadata, self.angles, self.dtype)

    @cached_property
    def _own_attention(self) -> Stack:
        """Return the attention of the model's layers, without that of the module that drafts."""
        layers = self.attention.layers
        return self.attention if self.drafts is None else replace(self.attention, layers=layers[:-1])


def cos_sin(rotary: Any, num_pairs: int, placement: Placement, positions: Tensor, layer_type: str) -> Tensor:
    """Return the angles [T, R] float32 of `apply_rope` at positions [T], by a model's own rotary embedding (YaRN and
    all other kinds).

    Args:
        rotary: Rotary embedding of transformers.
        num_pairs: Half of R.
        layer_type: Type of rotary embedding, in a model with several.
    """

    def angles(positions: Tensor) -> Tensor:
        x = torch.empty(0, dtype=torch.float32, device=positions.device)
        types = {"layer_type": layer_type} if hasattr(rotary, "layer_types") else {}
        parts: Any = rotary(x, positions[None], **types)
        if isinstance(parts, Tensor):  # DeepSeek-V2 rotates complex numbers
            return torch.cat([parts[0].real, parts[0].imag], -1)
        # Each angle once: most models repeat them for the second half.
        return torch.cat([part[0, :, :num_pairs] for part in parts], -1)

    return by_rows(angles, positions) if placement.dcp.deterministic else angles(positions)
