"""The digest of weights: equal for equal weights alone."""

import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dcpmla.config import DCPConfig
from dcpmla.integrations import weights_digest as module
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.model_size import read_model
from dcpmla.integrations.weights_digest import norms_digest, weights_digest
from tests.support.models import FAMILIES, save_tiny
from tests.support.ranks import run_ranks
from tests.support.whole_models import load_on_rank

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
    """Compute the same digest in Python's integers, for contiguous tensors."""
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
        digest.update(f".{name} {tuple(tensor.shape)} {tensor.dtype} {signed}\n".encode())
    return digest.digest()


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 64)


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_python_s_integers(dtype: torch.dtype) -> None:
    weights = Weights(a=random_tensor((33, 5), dtype), b=random_tensor((), dtype), c=random_tensor((0, 4), dtype))
    assert weights_digest(weights) == plain_digest(weights)


@pytest.mark.parametrize("distance", [1, 2, 4, 8, 1 << 10, 1 << 16])
def test_swaps_of_words_that_differ_in_their_sign(distance: int) -> None:
    """A sum of products with the position does not see them: 2**63 times an even number is 0 in 64 bits."""
    tensor = torch.zeros(1 << 17, dtype=torch.int64)
    tensor[5] = -(1 << 63)
    assert digest_of(tensor) != digest_of(tensor.roll(distance))


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


def test_tensors_in_attributes_count() -> None:
    weights, outer = Weights(), nn.Sequential(nn.Linear(2, 2))
    outer.append(weights)
    digests = {weights_digest(outer)}
    weights.experts = (random_tensor((2, 3)), [random_tensor((2, 3)), None])
    digests.add(weights_digest(outer))
    weights.experts[1][0][1, 1] = 99
    digests.add(weights_digest(outer))
    weights._scratch = random_tensor((3,))
    digests.add(weights_digest(outer))
    assert len(digests) == 3


def load_and_digest(directories: list[Path]) -> list[tuple[bytes, int]]:
    """On one rank: each model's digest, and the bytes that it covers."""
    digests = []
    for directory in directories:
        model, _ = load_on_rank(directory, DCPConfig(), dtype=None)
        roots = [root for root in vars(model).values() if isinstance(root, nn.Module)]
        tensors = {id(tensor): tensor for root in roots for _, tensor in module._weights(root)}
        digests.append((weights_digest(*roots), sum(tensor.nbytes for tensor in tensors.values())))
    return digests


def load_twice(directories: list[Path]) -> tuple[list[tuple[bytes, int]], list[tuple[bytes, int]]]:
    """On one rank: load each model twice, the second time with NaN in memory that is allocated and not filled."""
    first = load_and_digest(directories)
    torch.use_deterministic_algorithms(True, warn_only=True)
    return first, load_and_digest(directories)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Save a model of each family in a directory of its name."""
    models = tmp_path_factory.mktemp("models")
    directories = [models / family for family in FAMILIES]
    for directory in directories:
        save_tiny(directory.name, directory)
    return directories


def test_every_family(directories: list[Path]) -> None:
    """A digest covers all weights that a rank holds, and no memory that has no content."""
    ((first, second),) = run_ranks(1, load_twice, directories)
    assert [digest for digest, _ in first] == [digest for digest, _ in second]
    assert len({digest for digest, _ in first}) == len(FAMILIES)
    for directory, (_, num_bytes) in zip(directories, first, strict=True):
        assert num_bytes >= read_model(load_config(directory), False).weight_bytes(1, False)["total"]


@pytest.mark.gpu
def test_a_gpu_computes_the_same() -> None:
    for dtype in DTYPES:
        tensor = random_tensor((1000, 1001), dtype)
        assert digest_of(tensor.cuda()) == digest_of(tensor)


def norms_of(directories: list[Path], tp: int) -> list[str]:
    """On one rank: the digest of each model's norms."""
    dcp = DCPConfig(tensor_parallel_size=tp, decode_context_parallel_size=tp)
    return [norms_digest(*load_on_rank(path, dcp)[0].modules()) for path in directories]


# Other families have norms of the same kinds.
NORMS = {"longcat_flash", "minicpm3", "axk2", "hy_v4", "glm_moe_dsa", "mistral_large4_text", "dots3_note_text"}
NORMS |= {"deepseek_v3", "deepseek_v4", "kimi_k3", "bailing_hybrid", "glm5_next_text"}


def test_norms_have_one_digest_whatever_the_layout_is(directories: list[Path], tmp_path: Path) -> None:
    """Another one once a single norm has changed."""
    paths = [directory for directory in directories if directory.name in NORMS]
    (alone,) = run_ranks(1, norms_of, paths, 1)
    assert run_ranks(2, norms_of, paths, 2) == [alone, alone]
    shutil.copytree(paths[0], tmp_path, dirs_exist_ok=True)
    (file,) = tmp_path.glob("*.safetensors")
    weights = load_file(file)
    name = next(name for name in weights if "layernorm" in name)
    weights[name] = weights[name] + 2**-7
    save_file(weights, file, metadata={"format": "pt"})
    assert run_ranks(1, norms_of, [tmp_path], 1)[0][0] != alone[0]
