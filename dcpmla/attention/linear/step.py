"""The part of a step that layers of linear attention need, and its builder."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.build import GraphRows, HostStep, StepBuilder
from dcpmla.attention.linear.cache import HybridPlan
from dcpmla.attention.linear.delta import DeltaRequests
from dcpmla.attention.step import StepMetadata
from dcpmla.config import DCPConfig


@dataclass(frozen=True)
class DeltaMetadata:
    """The requests of a step for layers of linear attention; decodes and prefills alike.

    Attributes:
        requests: Rows, positions and states of the requests.
    """

    requests: DeltaRequests

    def of_tokens(self, index: int, size: int) -> "DeltaMetadata":
        """Raise NotImplementedError: no MTP module has linear attention."""
        raise NotImplementedError("a token of a step has no state of its own")


class HybridStepBuilder(StepBuilder):
    """Builder of one rank's steps over layers of dense MLA and of linear attention."""

    absorbs_pieces = has_static_decodes = False

    def __init__(
        self, plan: HybridPlan, dcp: DCPConfig, dcp_rank: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(dcp, dcp_rank, device)
        self.num_states, self._num_copies = plan.num_states, plan.num_copies

    def decode_query_len(self, max_decode_query_len: int) -> int:
        """Return the maximum new tokens of a decode: more could not be rolled back."""
        return min(max_decode_query_len, self._num_copies)

    def columns(self, host: HostStep) -> list[np.ndarray]:
        """Return each request's first row, first position, length and state."""
        query_lens, seq_lens, _, states = host.requests
        starts = np.cumsum(query_lens) - query_lens
        return [np.array([starts, np.subtract(seq_lens, query_lens), seq_lens, states], dtype=np.int32)]

    def share(self, step: StepMetadata, host: HostStep, block_table: Tensor, columns: Sequence[Tensor]) -> StepMetadata:
        """Return the step with its requests' rows and states."""
        return step.share(DeltaMetadata(DeltaRequests(*columns[0])))

    def share_graph(self, step: StepMetadata, rows: GraphRows) -> StepMetadata:
        """Return the step of a decode graph with its requests' rows and states."""
        seen = rows.seq_lens.view(-1, rows.query_len)  # 0 for padding
        starts = torch.arange(0, len(rows.seq_lens), rows.query_len, dtype=torch.int32, device=rows.states.device)
        # A request with fewer tokens repeats its last one, so the last row has its length.
        requests = DeltaRequests(starts, seen[:, 0] - 1, seen[:, -1].contiguous(), rows.states)
        return step.share(DeltaMetadata(requests))
