"""From SGLang's batch, whose slots are on the device, to what our attention takes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.backends.calls import decode_workspace
from dcpmla.attention.step.chunks import PrefillMetadata, lay_out_prefills
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.config import DCPConfig
from dcpmla.integrations.absorbed import DecodeLayout, TokenRange
from dcpmla.upload import upload

# Most new tokens of a prompt that attends as decodes do; `vllm.backend` documents the measured cost of both ways.
MAX_ABSORBED = 128


def is_prefill(batch: Any) -> bool:
    """Return whether a batch attends with keys and values of heads: one of its prompts has many new tokens."""
    return batch.forward_mode.is_extend_without_speculative() and max(batch.extend_seq_lens_cpu) > MAX_ABSORBED


class MetadataBuilder:
    """Block tables and lengths of one rank.

    SGLang numbers slots over all ranks of a DCP group ("widened"): slot s is on rank s % W, as its row s // W, and
    pages begin at multiples of page_size W. So a page's number is its first slot over that, the same on all ranks, and
    tokens are dealt one by one (I = 1).

    Args:
        dcp: DCP configuration whose block_size is SGLang's page size.
        req_to_token: [max_requests, max_context] int32, the slot of each token of each request.
        num_heads: Heads of all ranks of the DCP group.
        max_query_len: Most new tokens of a decode, with its drafts.
    """

    def __init__(self, dcp: DCPConfig, dcp_rank: int, req_to_token: Tensor, num_heads: int, max_query_len: int) -> None:
        self.slots_per_page = dcp.virtual_block_size
        self.first_slots = req_to_token[:, :: self.slots_per_page]
        device = req_to_token.device
        self.steps = StepBuilder(dcp, dcp_rank, device)
        self.layout = DecodeLayout(self.steps, num_heads, max_query_len, decode_workspace(device))

    def decodes(self, batch: Any, query_len: int, num_ahead: int) -> tuple[TokenRange, ...]:
        """Lay out requests of query_len tokens each, without a wait for the device: decodes, or tokens with drafts.

        Args:
            num_ahead: Tokens that a request has after the step and `batch.seq_lens` does not count.
        """
        capturing = batch.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing()
        # A graph is replayed with longer requests; between drafts, the host does not know how many were accepted.
        is_known = batch.seq_lens_cpu is not None and not capturing
        longest = int(batch.seq_lens_cpu.max()) + num_ahead if is_known else None
        return self.layout.uniform(self._table(batch, longest), (batch.seq_lens + num_ahead).int(), query_len)

    def short_prefills(self, batch: Any) -> tuple[TokenRange, ...]:
        """Lay out prompts of few new tokens each."""
        start = np.concatenate([[0], np.cumsum(batch.extend_seq_lens_cpu)]).astype(np.int32)
        (start_loc,) = upload([start], self.steps.layout.device)
        table = self._table(batch, max(_lens_after(batch)))
        return self.layout.build(table, batch.seq_lens.int(), start_loc, start, int(start[-1]))

    def prefill(self, batch: Any) -> PrefillMetadata:
        """Lay out requests of several tokens each."""
        seq_lens = _lens_after(batch)
        return lay_out_prefills(
            self.steps.layout, batch.extend_seq_lens_cpu, seq_lens, self._table(batch, max(seq_lens))
        )

    def _table(self, batch: Any, longest: int | None) -> Tensor:
        """Return the pages [num_reqs, max_pages] int32 of each request; max_pages follows from the longest request, or
        without it from the longest possible one.
        """
        columns = slice(0, None if longest is None else -(-longest // self.slots_per_page))
        return self.first_slots[:, columns][batch.req_pool_indices] // self.slots_per_page

    def slots(self, batch: Any) -> Tensor:
        """Return the slots [T] int64 of the new tokens on this rank, -1 where they are another's."""
        slots = batch.out_cache_loc.to(torch.int64)
        owner = self.steps.layout.owner
        return torch.where(slots % owner.size == owner.rank, slots // owner.size, -1)


def _lens_after(batch: Any) -> list[int]:
    """Return the tokens of each prompt after the step."""
    return [new + cached for new, cached in zip(batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True)]
