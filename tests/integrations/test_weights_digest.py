"""The digest of weights: equal for equal weights alone."""

from hashlib import sha256
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dcpmla.integrations import weights_digest as module
from dcpmla.integrations.weights_digest import weights_digest

DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool, torch.float64)


class Weights(nn.Module):
    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor, persistent=False)


def digest_of(tensor: Tensor) -> bytes:
    return weights_digest(Weights(weight=tensor))


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).mul(20).to(dtype)


def plain_digest(weights: nn.Module) -> bytes:
    """Compute the same digest in Python's integers, for tensors of one part."""
    digest, mask = sha256(), (1 << 64) - 1
    for name, tensor in [*weights.named_parameters(), *weights.named_buffers()]:
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        data += bytes(-len(data) % 8)
        total = 0
        for position in range(len(data) // 8):
            word = int.from_bytes(data[8 * position : 8 * position + 8], "little")
            word = (word + (position + 1) * 0x9E3779B97F4A7C15) & mask
            word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
            word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
            total = (total + (word ^ (word >> 31))) & mask
        signed = total - (total >> 63 << 64)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {signed}\n".encode())
    return digest.digest()


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_python_s_integers(dtype: torch.dtype) -> None:
    weights = Weights(a=random_tensor((3, 5), dtype), b=random_tensor((), dtype), c=random_tensor((0, 4), dtype))
    assert weights_digest(weights) == plain_digest(weights)


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 64)


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_each_element_and_each_swap_counts(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 101).to(dtype).view(4, 25)
    digests = {digest_of(tensor)}
    for index in range(100):
        changed = tensor.clone()
        changed.view(-1).view(torch.uint8)[index * dtype.itemsize] ^= 1
        swapped = tensor.clone().view(-1)
        swapped[index], swapped[index - 1] = tensor.view(-1)[index - 1], tensor.view(-1)[index]
        digests |= {digest_of(changed), digest_of(swapped.view(4, 25))}
    equal_neighbors = sum((tensor.view(-1).float() == tensor.view(-1).float().roll(1)).tolist())  # in 8 bits
    assert len(digests) == 201 - equal_neighbors


@pytest.mark.parametrize("distance", [1, 2, 4, 8, 1 << 10, 1 << 16])
def test_swaps_of_words_that_differ_in_their_sign(distance: int) -> None:
    """A sum of products with the position does not see them: 2**63 times an even number is 0 in 64 bits."""
    tensor = torch.zeros(1 << 17, dtype=torch.int64)
    tensor[5] = -(1 << 63)
    assert digest_of(tensor) != digest_of(tensor.roll(distance))


@given(
    data=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=2, max_size=20),
    permutation=st.randoms(use_true_random=False),
)
@settings(max_examples=100, deadline=None)
def test_any_order_counts(data: list[int], permutation: Random) -> None:
    other = permutation.sample(data, len(data))
    assert (digest_of(torch.tensor(data)) == digest_of(torch.tensor(other))) == (data == other)


def test_names_shapes_and_dtypes_count() -> None:
    tensor = random_tensor((4, 6))
    tensors = [tensor, tensor.view(6, 4), tensor.view(torch.float16), tensor.view(torch.uint8), tensor[:3]]
    digests = {digest_of(each) for each in tensors} | {weights_digest(Weights(other=tensor))}
    digests |= {weights_digest(Weights(weight=tensor, other=tensor[:0])), weights_digest(Weights())}
    digests |= {weights_digest(Weights(a=tensor, b=tensor + 1)), weights_digest(Weights(a=tensor + 1, b=tensor))}
    assert len(digests) == 10


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_memory_in_any_order(dtype: torch.dtype) -> None:
    """Views of other tensors, at any address: their elements count, and nothing between them."""
    around = random_tensor((7, 9, 11), dtype)
    for view in (around[1:, ::2, 3:], around.transpose(0, 2), around[3], around.view(-1)[5:], around[:1, 2, 3]):
        copy = view.clone(memory_format=torch.preserve_format)
        before = digest_of(view)
        assert before == digest_of(view)
        changed = around.clone()
        view_of_changed = changed.as_strided(view.shape, view.stride(), view.storage_offset())
        view_of_changed[(0,) * view.ndim] = 99
        assert digest_of(view_of_changed) != before
        if copy.stride() == view.stride():
            assert digest_of(copy) == before
    changed = around.clone()
    changed[0, 1, 0] = 99  # between the elements of the view
    assert digest_of(changed[:, ::2]) == digest_of(around[:, ::2])


@pytest.mark.gpu
def test_a_gpu_computes_the_same() -> None:
    for dtype in DTYPES:
        tensor = random_tensor((1000, 1001), dtype)
        assert digest_of(tensor.cuda()) == digest_of(tensor)
