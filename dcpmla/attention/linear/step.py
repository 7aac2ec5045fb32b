"""The part of a step that layers of linear attention need, and its builder."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.build import GraphRows, HostStep, StepBuilder
from dcpmla.attention.linear.cache import HybridPlan
from dcpmla.attention.linear.calls import DeltaRequests
from dcpmla.attention.step import StepMetadata, StepRequests
from dcpmla.config import DCPConfig
from dcpmla.upload import upload

# Tokens from which a piece attends in chunks. On an H200 the recurrence of 32 heads takes 4 to 5 us a token and layer,
# and launches of kernels for chunks take 2 to 3 ms in an engine, whatever the number of tokens up to 2,048.
LONG_PIECE = 512


class DeltaPieces(NamedTuple):
    """Long pieces of prompts, the last requests of a step, in chunks.

    A row is a token's among the pieces' tokens. A slot is a row of `DeltaState.recent`, counted over all states, and a
    copy is one of `DeltaState.memory`, counted likewise.

    Attributes:
        num_requests, first_row: Number of requests before the pieces, and of their tokens.
        start_loc, host_start_loc: First row of each piece [n + 1], int64, on the device and on the host.
        before: Slots of the conv_size tokens before each piece [n, conv_size], int64.
        has_before: Whether there is such a token [n, conv_size].
        kept_rows, kept_slots: Rows that the state keeps, and their slots [m], int64.
        memory_before, memory_after: Copies before and after each piece [n], int64.
        has_memory: Whether a token comes before each piece [n].
    """

    num_requests: int
    first_row: int
    start_loc: Tensor
    host_start_loc: Tensor
    before: Tensor
    has_before: Tensor
    kept_rows: Tensor
    kept_slots: Tensor
    memory_before: Tensor
    memory_after: Tensor
    has_memory: Tensor


@dataclass(frozen=True)
class DeltaMetadata:
    """The requests of a step for layers of linear attention; decodes and prefills alike.

    Attributes:
        requests: Rows, positions and states of the requests.
        pieces: Requests that attend in chunks; None where all go through the recurrence.
    """

    requests: DeltaRequests
    pieces: DeltaPieces | None = None

    def of_tokens(self, index: int, size: int) -> "DeltaMetadata":
        """Raise NotImplementedError: no MTP module has linear attention."""
        raise NotImplementedError("a token of a step has no state of its own")


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
        self.num_states, self._plan, self._takes_chunks = plan.num_states, plan, takes_chunks

    def columns(self, host: HostStep) -> list[np.ndarray]:
        """Return each request's first row, first position, length and state."""
        query_lens, seq_lens, _, states = host.requests
        starts = np.cumsum(query_lens) - query_lens
        return [np.array([starts, np.subtract(seq_lens, query_lens), seq_lens, states], dtype=np.int32)]

    def extend(self, step: StepMetadata, host: HostStep, block_table: Tensor, arrays: Sequence[Tensor]) -> StepMetadata:
        """Return the step with its requests' rows and states."""
        pieces = self._pieces(host.requests) if self._takes_chunks else None
        return step.with_kind(DeltaMetadata(DeltaRequests(*arrays[0]), pieces))

    def extend_graph(self, step: StepMetadata, rows: GraphRows) -> StepMetadata:
        """Return the step of a decode graph with its requests' rows and states."""
        seen = rows.seq_lens.view(-1, rows.query_len)  # 0 for padding
        starts = torch.arange(0, len(rows.seq_lens), rows.query_len, dtype=torch.int32, device=rows.states.device)
        # A request with fewer tokens repeats its last one, so the last row has its length.
        requests = DeltaRequests(starts, seen[:, 0] - 1, seen[:, -1].contiguous(), rows.states)
        return step.with_kind(DeltaMetadata(requests))

    def _pieces(self, requests: StepRequests) -> DeltaPieces | None:
        """Return the long pieces of a step; None without any."""
        lens = requests.query_lens
        num_requests = next((index for index, length in enumerate(lens) if length >= LONG_PIECE), len(lens))
        new, end, states = (
            np.array(column[num_requests:], dtype=np.int64)
            for column in (requests.query_lens, requests.seq_lens, requests.states)
        )
        if not len(new):
            return None
        num_recent, num_copies, first = self._plan.recent_shape[1], self._plan.num_copies, end - new
        start_loc = np.concatenate([[0], np.cumsum(new)])
        before = first[:, None] - np.arange(self._plan.delta.conv_size, 0, -1)
        kept = np.minimum(new, num_recent)
        request = np.repeat(np.arange(len(new)), kept)
        back = np.concatenate([np.arange(number, 0, -1) for number in kept])  # rows before the piece's end
        numbers = [
            start_loc,
            states[:, None] * num_recent + before % num_recent,
            before >= 0,
            start_loc[1:][request] - back,
            states[request] * num_recent + (end[request] - back) % num_recent,
            states * num_copies + (first - 1) % num_copies,
            states * num_copies + (end - 1) % num_copies,
            first > 0,
        ]
        there = upload(numbers, self.device)
        first_row = sum(requests.query_lens[:num_requests])
        return DeltaPieces(num_requests, first_row, there[0], torch.from_numpy(start_loc), *there[1:])
