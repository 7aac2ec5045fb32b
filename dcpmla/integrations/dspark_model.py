"""A DSpark module as the engine runs it (`DSparkModel`)."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.layers import Cache
from dcpmla.integrations.draft_model import GraphStep, Prepare
from dcpmla.model.dspark import DSpark
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.acceptance import MAX_DRAFT_ROWS
from dcpmla.runtime.block_drafter import BlockDrafter
from dcpmla.runtime.drafts import Drafter
from dcpmla.runtime.graph import StepGraph


class DSparkModel:
    """A DSpark module over a loaded model, whose steps write the module's context themselves.

    Args:
        module: The module, whose layers are the last ones of the model's cache.
        prepare: Function that returns a step with what these layers need.
    """

    def __init__(self, module: DSpark, prepare: Prepare) -> None:
        self.module, self._prepare = module, prepare
        self._device = module.norm.device

    def keep(self, num_tokens: int) -> None:
        """Keep nothing of a step: its context is in the cache."""

    @torch.inference_mode()
    def draft(self, tokens: Tensor, metadata: StepMetadata, cache: Cache, num_drafts: int) -> Tensor:
        """Draft blocks, for a `StepGraph`. Collective over the TP group.

        Args:
            tokens: [n block_size] int64, the last token of each request block_size times.
            metadata: Step of n requests with block_size tokens each.
        Returns:
            [n block_size] int64, request after request: num_drafts drafts, then zeros.
        """
        size = self.module.block_size
        drafts = self.module(tokens[::size].contiguous(), self._prepare(metadata), cache, num_drafts)
        return torch.nn.functional.pad(drafts, (0, size - num_drafts)).flatten()

    @torch.inference_mode()
    def profile(self, num_tokens: int) -> None:
        """Run dummy blocks without a cache (`ShardedModel.profile`)."""
        size = self.module.block_size
        num_blocks = max(1, min(num_tokens, MAX_DRAFT_ROWS) // size)
        self.module(torch.zeros(num_blocks, dtype=torch.int64, device=self._device), None, None, size)

    def graph_steps(self, num_drafts: int) -> list[GraphStep]:
        """Return the step whose graphs a drafter runs."""
        token, size = torch.zeros((), dtype=torch.int64, device=self._device), self.module.block_size
        return [GraphStep(partial(self.draft, num_drafts=num_drafts), token, size, is_block=True)]

    def new_drafter(self, num_drafts: int, cache: Cache, mesh: DCPMesh, graphs: Sequence[StepGraph]) -> Drafter:
        """Return a drafter over a cache and the graphs of `graph_steps`."""
        return BlockDrafter(num_drafts, self.module.block_size, cache, mesh, *graphs)
