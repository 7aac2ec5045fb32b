"""Drafts of a module that drafts a block in one pass (DSpark), after a context that the model's steps have written."""

from collections.abc import Sequence

import numpy as np

from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.layers import Cache
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.drafts import Drafter, Drafts, agree_on_drafts
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.in_flight import InFlightStep
from dcpmla.runtime.request import Request
from dcpmla.upload import upload


class BlockDrafter(Drafter):
    """Drafts of a block that begins with the last token, at its position, which the model has not computed.

    A block has as many tokens as the module was trained for, whatever the number of drafts: they see each other.

    Args:
        block_size: Tokens of a block.
        graph: Graph of blocks; the block's position may pass the longest sequence by as many tokens.
    """

    reads_tokens = False

    def __init__(
        self, num_speculative_tokens: int, block_size: int, cache: Cache, mesh: DCPMesh, graph: StepGraph
    ) -> None:
        super().__init__(num_speculative_tokens)
        self._block_size, self._block_tokens = block_size, cache.sizes.block_tokens
        self._mesh, self._graph = mesh, graph

    def draft(self, wanted: Sequence[tuple[Request, int]], previous: InFlightStep | None) -> Drafts:
        """Draft a block after the last token of each request. Collective over the TP group; all ranks use the first
        rank's drafts.
        """
        rows, size = {} if previous is None else previous.rows, self._block_size
        nums = [num if request in rows else 0 for request, num in wanted]
        drafting = [request for (request, _), num in zip(wanted, nums, strict=True) if num]
        if previous is None or not drafting or self._graph.decode_size(len(drafting), size) is None:
            return Drafts.of([[]] * len(nums))
        chosen = [row * size + index for row, num in enumerate(filter(None, nums)) for index in range(num)]
        columns = [np.repeat([rows[request] for request in drafting], size), np.array(chosen)]
        at, chosen_there = upload(columns, previous.newest.device)
        num_rejected = previous.num_rejected(drafting) if previous.is_under_way else None
        blocks = self._graph.run(
            previous.newest.index_select(0, at), self._requests_of(drafting), num_rejected=num_rejected
        )
        return Drafts(nums, agree_on_drafts(blocks.index_select(0, chosen_there), self._mesh))

    def close(self) -> None:
        """Free the graph."""
        self._graph.release()

    def _requests_of(self, drafting: Sequence[Request]) -> StepRequests:
        """Return the requests of a step of blocks, each from its last token on."""
        seq_lens = [request.num_tokens + request.num_tried - 1 + self._block_size for request in drafting]
        # A block may pass the tokens that its request has room for. No layer of a block reads the table.
        missing = (
            -(-seq_len // self._block_tokens) - len(request.block_ids)
            for request, seq_len in zip(drafting, seq_lens, strict=True)
        )
        return StepRequests(
            [self._block_size] * len(drafting),
            seq_lens,
            [[*request.block_ids, *[0] * num] for request, num in zip(drafting, missing, strict=True)],
            [request.state for request in drafting],
        )
