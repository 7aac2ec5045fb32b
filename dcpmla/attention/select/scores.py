"""The indexer's scores: how much each token matters to a query token, over the keys of this rank.

Custom ops (`torch.ops.dcpmla`). The torch code here specifies them and runs on CPUs; GPUs run the kernels of
`attention/select/kernels/index_scores.py`.
"""

import torch
from torch import Tensor

from dcpmla.attention.select.calls import IndexQueries
from dcpmla.cache.index_keys import read_index_keys
from dcpmla.operators import operator

_MAX_PRODUCTS = 1 << 25  # products of heads and keys that are held at a time


@operator(
    "index_scores",
    kernel="dcpmla.attention.select.kernels.index_scores:index_scores",
    fake=IndexQueries.new_scores,
    runs=lambda call: call.q.is_cuda and call.q.element_size() <= 2,
)
def index_scores(call: IndexQueries) -> Tensor:
    """Sum weight x ReLU(q . key) over heads, for each token's keys on this rank.

    A pair's score does not depend on the other pairs in the call, so ranks that hold different tokens rank pairs
    alike.

    Returns:
        [T, max_blocks x block_size] float32 in the order of this rank's tokens; arbitrary after local_seq_lens, and in
        rows that are not scored.
    Source: DeepSeek-V3.2, equation 1.
    """
    q, weights, index_cache, block_table, request, _, local_seq_lens, _ = call
    scores = call.new_scores().zero_()
    tile = max(1, _MAX_PRODUCTS // max(1, scores.shape[1] * q.shape[1]))
    first_of_block = torch.arange(block_table.shape[1], device=q.device) * index_cache.shape[1]
    for start in range(0, q.shape[0], tile):
        rows = slice(start, start + tile)
        # Entries of the table after a request's last block may be anything.
        blocks = block_table[request[rows].long()].where(first_of_block < local_seq_lens[rows, None], 0).long()
        keys, scales = read_index_keys(index_cache, blocks)
        # Float64, rounded once: products of other shapes add in another order, which would change float32 results.
        products = torch.einsum("thd,tsd->tsh", q[rows].double(), keys.flatten(1, 2).double()).relu_()
        wide = torch.einsum("tsh,th->ts", products, weights[rows].double())
        scores[rows] = (wide if scales is None else wide * scales.flatten(1).double()).float()
    return scores
