"""The layout of a step of a model whose layers attend to selected tokens, or to a window."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.build import HostStep
from dcpmla.attention.chunks import chunk_bounds
from dcpmla.attention.sparse.build import SparseStepBuilder
from dcpmla.attention.step import StepMetadata
from dcpmla.attention.windowed.step import WindowMetadata
from dcpmla.config import DCPConfig


class WindowedStepBuilder(SparseStepBuilder):
    """Builder of one rank's steps of sparse MLA and of layers with a window.

    Args:
        window: Number of tokens that a token attends to in a layer with a window.
    """

    def __init__(self, window: int, dcp: DCPConfig, dcp_rank: int, device: torch.device | str = "cpu") -> None:
        super().__init__(dcp, dcp_rank, device)
        self._window = window

    def extend(self, step: StepMetadata, host: HostStep, block_table: Tensor, arrays: Sequence[Tensor]) -> StepMetadata:
        """Return the step with the tokens that each token may select from, and the context that windows reach."""
        step = super().extend(step, host, block_table, arrays)
        query_lens, seq_lens, _, _ = host.requests
        prefill, prefills = None, slice(host.num_decodes, None)
        if step.prefill is not None:
            context_lens = np.subtract(seq_lens[prefills], query_lens[prefills])
            alignment = self.dcp.chunk_alignment
            first = np.maximum(context_lens - self._window + 1, 0) // alignment * alignment
            bounds = chunk_bounds(context_lens - first, self.dcp.context_workspace_tokens, alignment)
            chunks = (self.chunks.build(first + begin, first + end, block_table[prefills]) for begin, end in bounds)
            prefill = replace(step.prefill, context_chunks=tuple(chunks), window=self._window)
        return step.with_kind(WindowMetadata(prefill))
