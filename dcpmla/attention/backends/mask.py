"""Selected positions as bits, for attention that computes all scores of a tile and excludes unselected keys.

A custom op (`torch.ops.dcpmla`). The torch code here specifies it and runs on CPUs; GPUs run the kernel of
`attention/triton/mask.py`.
"""

import torch
from torch import Tensor

from dcpmla.operators import is_on_gpu, operator

_WORD = 32  # bits of a word


@operator(
    "selection_mask",
    kernel="dcpmla.attention.triton.mask:selection_mask",
    fake=lambda positions, _starts, _first, num_keys: positions.new_empty(positions.shape[0], -(-num_keys // _WORD)),
    runs=is_on_gpu,
)
def selection_mask(positions: Tensor, query_start_loc: Tensor, first_position: Tensor, num_keys: int) -> Tensor:
    """Return which keys of a segment each token selects: of the new tokens or of a chunk of context, consecutive tokens
    of each request.

    Args:
        positions: [T, topk] int32 in each token's request (`SelectedTokens.positions`), none twice, -1 for none;
            contiguous columns.
        query_start_loc: [num_reqs + 1] int32, where each request's tokens start in T.
        first_position: [num_reqs] int32, of each request's first key in the segment.
        num_keys: Maximum keys of a request in the segment.
    Returns:
        [T, ceil(num_keys / 32)] int32: bit j % 32 of word j // 32 is set if first_position + j is selected. After a
        request's own keys, where it has fewer than others, bits mean nothing.
    """
    num_tokens = positions.shape[0]
    request = torch.searchsorted(query_start_loc[1:], torch.arange(num_tokens), right=True)
    key = positions - first_position[request, None]
    is_here = (positions >= 0) & (key >= 0) & (key < num_keys)
    key = key.where(is_here, 0)
    bits = torch.where(is_here, 1 << key % _WORD, 0).to(torch.int32)
    words = positions.new_zeros(num_tokens, -(-num_keys // _WORD))
    return words.scatter_add_(1, (key // _WORD).long(), bits)  # no bit comes twice: the sum is their union


def unpack_mask(words: Tensor, num_keys: int) -> Tensor:
    """Return the bits of `selection_mask`, words [T, W], as [T, num_keys] bool."""
    bits = words[..., None] >> torch.arange(_WORD, device=words.device) & 1
    return bits.flatten(1)[:, :num_keys] != 0
