"""The model that an engine drives (`Model`)."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dcpmla.attention.stack import Stack
from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.layers import Cache


class Model(Protocol):
    """The model that the engine drives; `dcpmla.integrations.sharded_model.ShardedModel` is one.

    `prepare` adds what layers share to a step whose attention by MHA is launched between graphs.
    """

    attention: Stack
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    eos_token_ids: frozenset[int]

    def hidden(self, token_ids: Tensor, metadata: StepMetadata, cache: Cache) -> Tensor: ...

    def logits(self, hidden_states: Tensor) -> Tensor: ...

    def prepare(self, metadata: StepMetadata) -> StepMetadata: ...

    @property
    def faults(self) -> Sequence[Tensor]: ...

    def check(self) -> None: ...
