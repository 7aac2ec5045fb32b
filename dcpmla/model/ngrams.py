"""Hashes of n-grams, which choose rows of the tables of memories (`dcpmla.model.memory`).

A token's n-grams are the last 2 to N tokens of its sequence, the token's own included. Tokens are compared by a
compressed id, which spellings of a word share. The cache keeps the compressed ids of all positions, so that any step
reads the tokens before its own, whether an earlier chunk, another request with the same prefix, or drafts wrote them.

Source: the Engram paper (Cheng et al., 2026), section 2.2, and vLLM's DeepSeek-V4.1.
"""

import torch
from torch import Tensor, nn

from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.layers import Cache
from dcpmla.model.buckets import Buckets
from dcpmla.model.token_slots import TokenSlots
from dcpmla.operators import is_on_gpu, nothing, operator


class NgramHash(nn.Module):
    """The hashes of a step's tokens.

    Args:
        token_map: Compressed id of each token, int32 [vocab].
        pad_id: Compressed id in place of tokens before a sequence's first.
        buckets: Hash functions of this rank's columns.
    """

    token_map: Tensor
    multipliers: Tensor
    orders: Tensor
    primes: Tensor
    starts: Tensor

    def __init__(self, token_map: Tensor, pad_id: int, buckets: Buckets) -> None:
        super().__init__()
        self.register_buffer("token_map", token_map, persistent=False)
        self.pad_id = pad_id
        for name, values in buckets._asdict().items():
            self.register_buffer(name, values, persistent=False)

    def forward(self, token_ids: Tensor, step: StepMetadata | None, cache: Cache | None) -> Tensor:
        """Return a row of each layer's table for each column, int32 [L, T, C], of tokens [T] int64. Padding has
        rows of the table, too. In a profile, step and cache are None.
        """
        (num_layers, num_columns), num_tokens = self.primes.shape, len(token_ids)
        hashes = torch.zeros(num_layers, num_tokens, num_columns, dtype=torch.int32, device=token_ids.device)
        if step is not None:
            assert cache is not None
            assert cache.token_ids is not None
            step.run_outside_graph(self._hash, hashes, token_ids, cache.token_ids)
        return hashes

    def _hash(self, hashes: Tensor, token_ids: Tensor, cached_ids: Tensor, step: StepMetadata) -> None:
        """Cache the ids of a step's tokens, and write the tokens' hashes."""
        rows = TokenSlots(step.tokens.request, step.tokens.seq_lens, step.table.block_table)
        store_ids(cached_ids, token_ids, self.token_map, rows)
        hash_ngrams(hashes, cached_ids, rows, self._buckets, self.pad_id)

    @property
    def _buckets(self) -> Buckets:
        return Buckets(self.multipliers, self.orders, self.primes, self.starts)


def _slots(cached_ids: Tensor, rows: TokenSlots, positions: Tensor) -> Tensor:
    """Return the slots of positions [T] in cached ids [num_blocks, block_tokens], flat; -1 before the first."""
    block_tokens = cached_ids.shape[1]
    blocks = rows.block_table[rows.request.long(), positions.clamp(min=0) // block_tokens].long()
    return (blocks * block_tokens + positions % block_tokens).where(positions >= 0, -1)


@operator(
    "store_ids",
    kernel="dcpmla.model.kernels.ngrams:store_ids",
    fake=nothing,
    runs=is_on_gpu,
    mutates_args=("cached_ids",),
)
def store_ids(cached_ids: Tensor, token_ids: Tensor, token_map: Tensor, rows: TokenSlots) -> None:
    """Write the compressed ids of a step's tokens into a cache. A custom op.

    Args:
        cached_ids: Compressed ids of all positions, int32 [num_blocks, block_tokens].
        token_ids: Tokens, int64, T and maybe padding after them.
        token_map: Same as in `NgramHash`.
        rows: Slots of T tokens. Tokens of padding are not written.
    """
    slots = _slots(cached_ids, rows, rows.seq_lens.long() - 1)
    is_real = slots >= 0
    cached_ids.view(-1)[slots[is_real]] = token_map[token_ids[: len(slots)][is_real]]


@operator(
    "hash_ngrams",
    kernel="dcpmla.model.kernels.ngrams:hash_ngrams",
    fake=nothing,
    runs=is_on_gpu,
    mutates_args=("hashes",),
)
def hash_ngrams(hashes: Tensor, cached_ids: Tensor, rows: TokenSlots, buckets: Buckets, pad_id: int) -> None:
    """Hash the n-grams that end with a step's tokens, whose ids are cached. A custom op.

    The numbers of an n-gram are XORed, each a compressed id times the multiplier of its distance; the remainder by a
    prime is the row within the bucket.

    Args:
        hashes: Results, int32 [L, n, C]; rows past the T tokens stay unchanged.
        cached_ids, rows: Same as in `store_ids`.
        buckets, pad_id: Same as in `NgramHash`.
    """
    multipliers, orders, primes, starts = buckets
    mixed: list[Tensor] = []
    for distance in range(multipliers.shape[1]):
        slots = _slots(cached_ids, rows, rows.seq_lens.long() - 1 - distance)
        ids = cached_ids.view(-1)[slots].long().where(slots >= 0, pad_id)
        numbers = ids * multipliers[:, distance, None]
        mixed.append(mixed[-1] ^ numbers if mixed else numbers)
    chosen = torch.stack(mixed, -1)[..., orders - 1]
    hashes[:, : chosen.shape[1]] = chosen % primes[:, None] + starts[:, None]
