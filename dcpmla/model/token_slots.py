"""The slots of a step's tokens in a cache of token ids (`CachePlan.keeps_token_ids`)."""

from typing import NamedTuple

from torch import Tensor


class TokenSlots(NamedTuple):
    """The slots of T tokens: a request's token at position p is in block p // block_tokens of its row of the table.

    Attributes:
        request: Request of each token, int32 [T].
        seq_lens: Tokens of the request up to and including the token, int32 [T]; 0 for padding.
        block_table: Block ids of each request, int32 [num_reqs, max_blocks].
    """

    request: Tensor
    seq_lens: Tensor
    block_table: Tensor
