"""The builder of steps over layers of MLA and of linear attention."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.build import GraphRows, HostStep, StepBuilder
from dcpmla.attention.linear.cache import HybridPlan
from dcpmla.attention.linear.calls import DeltaRequests
from dcpmla.attention.linear.layout import DeltaLayout, DeltaMetadata
from dcpmla.attention.step import StepMetadata, StepRequests
from dcpmla.config import DCPConfig


class HybridStepBuilder(StepBuilder):
    """Builder of one rank's steps over layers of dense MLA and of linear attention.

    Args:
        takes_chunks: Whether long pieces attend in chunks.
    """

    absorbs_pieces = has_static_decodes = False

    def __init__(
        self,
        plan: HybridPlan,
        dcp: DCPConfig,
        dcp_rank: int,
        device: torch.device | str = "cpu",
        takes_chunks: bool = False,
    ) -> None:
        super().__init__(dcp, dcp_rank, device)
        self.num_states, self._takes_chunks = plan.num_states, takes_chunks

    def columns(self, host: HostStep) -> list[np.ndarray]:
        """Return the packed numbers of the requests."""
        return [self._layout_of(len(host.requests.query_lens), len(host.positions)).pack(host.requests)]

    def extend(self, step: StepMetadata, host: HostStep, block_table: Tensor, arrays: Sequence[Tensor]) -> StepMetadata:
        """Return the step with its requests' rows and states."""
        return self.extend_mixed(step, arrays[0], len(host.requests.query_lens))

    def extend_graph(self, step: StepMetadata, rows: GraphRows) -> StepMetadata:
        """Return the step of a decode graph with its requests' rows and states."""
        seen = rows.seq_lens.view(-1, rows.query_len)  # 0 for padding
        starts = torch.arange(0, len(rows.seq_lens), rows.query_len, dtype=torch.int32, device=rows.states.device)
        # A request with fewer tokens repeats its last one, so the last row has its length.
        requests = DeltaRequests(starts, seen[:, 0] - 1, seen[:, -1].contiguous(), rows.states)
        return step.with_kind(DeltaMetadata(requests, requests))

    def mixed_numbers(self, requests: StepRequests, num_reqs: int, num_tokens: int) -> np.ndarray:
        """Return the packed numbers of the requests, padded."""
        return self._layout_of(num_reqs, num_tokens).pack(requests)

    def extend_mixed(self, step: StepMetadata, numbers: Tensor, num_reqs: int) -> StepMetadata:
        """Return the step with its requests' rows and states, parts of the packed numbers."""
        return step.with_kind(self._layout_of(num_reqs, step.num_tokens).unpack(numbers))

    def _layout_of(self, num_reqs: int, num_tokens: int) -> DeltaLayout:
        return DeltaLayout.of_step(num_reqs, num_tokens, self._takes_chunks)
