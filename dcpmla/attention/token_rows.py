"""The slots of a step's tokens in a cache of token ids (`CachePlan.keeps_token_ids`)."""

from typing import NamedTuple

from torch import Tensor

from dcpmla.attention.build import GraphRows
from dcpmla.attention.step import StepMetadata, tokens_of


class TokenRows(NamedTuple):
    """The slots of T tokens: a request's token at position p is in block p // block_tokens of its row of the table.

    Attributes:
        request: Request of each token, int32 [T].
        seq_lens: Tokens of the request up to and including the token, int32 [T]; 0 for padding.
        block_table: Block ids of each request, int32 [num_reqs, max_blocks].
    """

    request: Tensor
    seq_lens: Tensor
    block_table: Tensor

    def of_tokens(self, index: int, size: int) -> "TokenRows":
        """Return the slots of each request's token number `index` alone, where each request has `size` tokens."""
        request, seq_lens = (tokens_of(column, index, size) for column in (self.request, self.seq_lens))
        return TokenRows(request, seq_lens, self.block_table)


def with_token_rows(step: StepMetadata, request: Tensor, block_table: Tensor) -> StepMetadata:
    """Return a step with the slots of its tokens. No token is padding.

    Args:
        request, block_table: Same as in `TokenRows`.
    """
    return step.with_kind(TokenRows(request, (step.positions + 1).int(), block_table))


def with_graph_rows(step: StepMetadata, rows: GraphRows) -> StepMetadata:
    """Return the step of a graph with the slots of its tokens."""
    return step.with_kind(TokenRows(rows.request, rows.seq_lens, rows.block_table))
