"""The layout of a step of sparse MLA."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from dcpmla.attention.build import GraphRows, HostStep, StepBuilder
from dcpmla.attention.sparse.step import SparseMetadata
from dcpmla.attention.step import StepMetadata


class SparseStepBuilder(StepBuilder):
    """Builder of one rank's steps of sparse MLA."""

    has_static_decodes = False

    def columns(self, host: HostStep) -> list[np.ndarray]:
        """Return each token's request, and its tokens up to there on all ranks and on this one."""
        return [host.request, (host.positions + 1).astype(np.int32), self.local_seq_lens(host.positions)]

    def extend(self, step: StepMetadata, host: HostStep, block_table: Tensor, arrays: Sequence[Tensor]) -> StepMetadata:
        """Return the step with the tokens that each token may select from."""
        request, seq_lens, local_seq_lens = arrays
        longest = max(host.requests.seq_lens)
        return step.with_kind(SparseMetadata(block_table, request, seq_lens, local_seq_lens, longest))

    def extend_graph(self, step: StepMetadata, rows: GraphRows) -> StepMetadata:
        """Return the step of a decode graph with the tokens that each row may select from."""
        numbers = rows.block_table, rows.request, rows.seq_lens, rows.local_seq_lens
        return step.with_kind(SparseMetadata(*numbers, rows.max_seq_len))
