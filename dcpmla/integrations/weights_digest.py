"""A digest of a model's weights, computed where they are."""

from collections.abc import Iterator
from hashlib import sha256

import torch
from torch import Tensor, nn

_CHUNK = 1 << 25  # bytes; bounds the memory of temporary tensors
_POSITION = -0x61C8864680B583EB  # odd; 2**64 / golden ratio, so that positions differ in all bits
# Shifts and factors of a mixing function, in which each bit of a word changes half the bits of the result.
_ROUNDS = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1))
_WORD = torch.int64.itemsize


@torch.no_grad()
def weights_digest(*modules: nn.Module) -> bytes:
    """Return a digest [32] of all weights of modules on this rank, with their names, shapes and dtypes.

    The weights are parameters, buffers, and tensors in attributes (experts, for one). Attributes and buffers whose
    names begin with an underscore are scratch memory. Each rank has a digest of its own; a model's digest combines the
    digests of all its ranks.

    Each tensor becomes the sum of its 64-bit words on its device, each mixed with its position. A change of one word
    always changes the sum. Any other change, for example a swap, leaves the sum unchanged with a probability of 2**-64.
    The sums do not protect against weights constructed to have equal sums.

    Source: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    # No wait for the device before all sums are launched.
    sums = [(name, tensor, _sum(tensor)) for module in modules for name, tensor in _weights(module)]
    digest = sha256()
    for name, tensor, total in sums:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {total.item()}\n".encode())
    return digest.digest()


@torch.no_grad()
def norms_digest(*modules: nn.Module) -> str:
    """Return a digest of all vectors of norms, which are the same on every rank of any job that serves the weights.

    Checkpoints of one config that were trained to different weights nearly always differ in some norm.
    """
    digest = sha256()
    for name, tensor in (each for module in modules for each in _weights(module)):
        if "norm" in name and tensor.ndim == 1 and tensor.is_floating_point():
            digest.update(name.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, part in module.named_modules():
        values = {**dict(part.named_parameters(recurse=False)), **dict(part.named_buffers(recurse=False)), **vars(part)}
        for name, value in values.items():
            if not name.startswith("_"):
                for tensor in _tensors(value):
                    yield f"{prefix}.{name}", tensor


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's mixed words, int64; it wraps around."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    position = 0
    for part in _parts(tensor):
        num_bytes = part.numel() * part.itemsize
        words = torch.zeros(-(-num_bytes // _WORD), dtype=torch.int64, device=tensor.device)
        words.view(torch.uint8)[:num_bytes].view(part.dtype).view(part.shape).copy_(part)
        words += torch.arange(position + 1, position + 1 + len(words), device=tensor.device).mul_(_POSITION)
        for shift, factor in _ROUNDS:
            # A shift of int64 fills with the sign, and a mixing function without loss needs zeros.
            words ^= (words >> shift).bitwise_and_((1 << 64 - shift) - 1)
            words *= factor
        total += words.sum()
        position += len(words)
    return total


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield views of at most `_CHUNK` bytes, which hold all elements in order."""
    num_elements = _CHUNK // tensor.itemsize
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(num_elements)
    elif tensor.numel() <= num_elements:
        yield tensor
    else:
        num_rows = max(1, num_elements * len(tensor) // tensor.numel())
        for rows in tensor.split(num_rows) if len(tensor) > 1 else tensor:
            yield from _parts(rows)
