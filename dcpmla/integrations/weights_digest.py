"""A digest of a model's weights, computed where they are."""

from collections.abc import Iterator
from hashlib import sha256
from itertools import chain

import torch
from torch import Tensor, nn

_CHUNK = 1 << 22  # 64-bit words; bounds the memory of temporary tensors
_POSITION = -0x61C8864680B583EB  # odd; 2**64 / golden ratio, so that positions differ in all bits
# Shifts and factors of a mixing function in which every bit of a word changes half the bits of the result.
_ROUNDS = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))
_WORD = torch.int64.itemsize


@torch.no_grad()
def weights_digest(module: nn.Module) -> bytes:
    """Return a digest [32] of all weights that a rank holds, with their names, shapes and dtypes.

    The weights are the parameters and the buffers, those that no checkpoint has included: buffers must not hold memory
    that nobody has filled. It is the digest of one rank; a digest of the model is one of all ranks' digests, in order.

    Each tensor becomes one sum of 64-bit words on its device, each word mixed with its position. A change of one word
    always changes the sum; any other change, such as a swap, leaves it with a probability of 2**-64. The sums are no
    defense against weights that someone has constructed for equal sums.

    Source: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014), without its last shift.
    """
    named = list(chain(module.named_parameters(), module.named_buffers()))
    sums = [_sum(tensor) for _, tensor in named]  # No wait for the device before all are launched.
    digest = sha256()
    for (name, tensor), total in zip(named, sums, strict=True):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {total.item()}\n".encode())
    return digest.digest()


def _sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's mixed words, int64; it wraps around."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    position = 0
    for part in _parts(tensor):
        num_bytes = part.numel() * part.itemsize
        words = torch.zeros(-(-num_bytes // _WORD), dtype=torch.int64, device=tensor.device)
        words.view(torch.uint8)[:num_bytes] = part.view(torch.uint8)
        words += torch.arange(position + 1, position + 1 + len(words), device=tensor.device).mul_(_POSITION)
        for shift, factor in _ROUNDS:
            # A shift of int64 fills with the sign, and a mixing function without loss needs zeros.
            words ^= (words >> shift).bitwise_and_((1 << 64 - shift) - 1)
            words *= factor
        total += words.sum()
        position += len(words)
    return total


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements in order, in contiguous tensors of one dimension and at most `_CHUNK` elements."""
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).split(_CHUNK)
    elif tensor.numel() <= _CHUNK:
        yield tensor.reshape(-1)
    else:
        num_rows = max(1, _CHUNK * len(tensor) // tensor.numel())
        for rows in tensor.split(num_rows) if len(tensor) > 1 else tensor:
            yield from _parts(rows)
