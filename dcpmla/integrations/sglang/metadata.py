"""From SGLang's batch, whose lengths are on the host and whose slots are on the device, to what our attention takes."""

from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.build import StepBuilder
from dcpmla.attention.calls import decode_workspace
from dcpmla.attention.step import DecodeMetadata, PrefillMetadata
from dcpmla.config import DCPConfig
from dcpmla.ownership import local_seq_lens


class MetadataBuilder:
    """Block tables and lengths of one rank.

    SGLang numbers slots over all ranks of a DCP group ("widened"): slot s is on rank s % W, as its row s // W, and
    pages begin at multiples of page_size W. So a page's number is its first slot over that, the same on all ranks, and
    tokens are dealt one by one (I = 1).

    Args:
        dcp: DCP configuration whose block_size is SGLang's page size.
        req_to_token: [max_requests, max_context] int32, the slot of each token of each request.
    """

    def __init__(self, dcp: DCPConfig, dcp_rank: int, req_to_token: Tensor) -> None:
        self.size, self.rank, self.slots_per_page = dcp.decode_context_parallel_size, dcp_rank, dcp.virtual_block_size
        self.first_slots = req_to_token[:, :: self.slots_per_page]
        self.steps = StepBuilder(dcp, dcp_rank, req_to_token.device)
        self.workspace = decode_workspace(req_to_token.device)

    def decode(self, batch: Any) -> DecodeMetadata:
        """Lay out requests of one token each, without a wait for the device."""
        capturing = batch.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing()
        seq_lens_cpu = None if capturing else batch.seq_lens_cpu  # a graph is replayed with longer requests
        lens = local_seq_lens(batch.seq_lens, self.size, self.rank)
        return DecodeMetadata(self._table(batch, seq_lens_cpu), lens, None, 1, self.workspace)

    def prefill(self, batch: Any) -> PrefillMetadata:
        """Lay out requests of several tokens each."""
        query_lens = batch.extend_seq_lens_cpu
        seq_lens = [new + cached for new, cached in zip(query_lens, batch.extend_prefix_lens_cpu, strict=True)]
        table = self._table(batch, torch.tensor(seq_lens))
        return self.steps.prefill(query_lens, seq_lens, table)

    def _table(self, batch: Any, seq_lens: Tensor | None) -> Tensor:
        """Return the pages [num_reqs, max_pages] int32 of each request; max_pages follows from the longest of seq_lens,
        or without it from the longest possible request.
        """
        longest = None if seq_lens is None else int(seq_lens.max())
        columns = slice(0, None if longest is None else -(-longest // self.slots_per_page))
        return self.first_slots[:, columns][batch.req_pool_indices] // self.slots_per_page

    def slots(self, batch: Any) -> Tensor:
        """Return the slots [T] int64 of the new tokens on this rank, -1 where they are another's."""
        slots = batch.out_cache_loc.to(torch.int64)
        return torch.where(slots % self.size == self.rank, slots // self.size, -1)
