"""The mask of selected positions, and kernels of prefill under a mask."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla.attention.backends import obstacles
from dcpmla.attention.backends.calls import PrefillCall
from dcpmla.attention.backends.choice import PREFILL_BACKENDS
from dcpmla.attention.backends.mask import selection_mask, unpack_mask
from dcpmla.attention.mla import prefill as operators
from tests.attention.test_prefill_backends import DEEPSEEK, LARGER_CASES, find_kernel
from tests.support.backends import as_kernel, prefill_call
from tests.support.hopper import ptx_for_hopper
from tests.support.prefill_checks import SCALE, Case, check_prefill, segments
from tests.support.shared_memory import run_interpreted

triton = pytest.importorskip("triton")


def select(seq_lens: Sequence[int], topk: int, seed: int = 0) -> Tensor:
    """[T, topk] positions at random, without order, of tokens that have so many at their position and before; -1 after
    them.
    """
    generator = torch.Generator().manual_seed(seed)
    positions = torch.full((len(seq_lens), topk), -1, dtype=torch.int32)
    for row, seq_len in zip(positions, seq_lens, strict=True):
        chosen = torch.randperm(seq_len, generator=generator)[:topk]
        row[: len(chosen)] = chosen
    return positions


def seq_lens_of_tokens(query_lens: Sequence[int], seq_lens: Sequence[int]) -> list[int]:
    return [seq - query + 1 + index for query, seq in zip(query_lens, seq_lens, strict=True) for index in range(query)]


@given(
    segment=st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 80)), min_size=1, max_size=4
    ),  # tokens, first position
    num_keys=st.integers(1, 100),
    topk=st.integers(1, 40),
    seed=st.integers(0, 10**6),
)
def test_selection_mask(segment: list[tuple[int, int]], num_keys: int, topk: int, seed: int) -> None:
    """Bit for bit: positions before and after the segment, none, requests that begin elsewhere."""
    query_lens, first = zip(*segment, strict=True)
    positions = select(
        torch.randint(0, 190, (sum(query_lens),), generator=torch.Generator().manual_seed(seed)).tolist(), topk, seed
    )
    words = selection_mask(
        positions, segments(query_lens, "cpu").start_loc, torch.tensor(first, dtype=torch.int32), num_keys
    )
    assert (words.dtype, words.shape) == (torch.int32, (sum(query_lens), -(-num_keys // 32)))
    first_of_token = [begin for length, begin in segment for _ in range(length)]
    expected = [
        [begin + key in row and key < num_keys for key in range(32 * words.shape[1])]
        for row, begin in zip(positions.tolist(), first_of_token, strict=True)
    ]
    assert [[bool(word >> bit & 1) for word in row for bit in range(32)] for row in words.tolist()] == expected
    assert unpack_mask(words, num_keys).tolist() == [row[:num_keys] for row in expected]


def check_mask_kernel(device: str) -> None:
    """Against the specification: rows of a wider tensor, top-k that is no power of 2, -1 everywhere, many requests."""
    from dcpmla.attention.triton.mask import selection_mask as kernel

    for query_lens, first, topk, num_keys in (
        ([3, 1, 9], [100, 0, 31], 40, 130),
        ([1] * 17, list(range(17)), 64, 32),
        ([2], [5], 100, 1),
    ):
        positions = select(seq_lens_of_tokens(query_lens, [begin + 60 for begin in first]), topk)
        positions[0] = -1
        wide = torch.cat([positions, torch.arange(len(positions) * 3, dtype=torch.int32).view(-1, 3)], 1)
        start_loc, first_position = segments(query_lens, "cpu").start_loc, torch.tensor(first, dtype=torch.int32)
        expected = selection_mask(positions, start_loc, first_position, num_keys)
        got = kernel(wide.to(device)[:, :topk], start_loc.to(device), first_position.to(device), num_keys)
        assert torch.equal(got.cpu(), expected)
        assert expected.count_nonzero()


# ---- kernels under a mask

MASKED_BACKENDS = ("hopper", "triton")
CASES: dict[str, Case] = {
    "causal": ([37, 1, 150], None, 2, (32, 16, 32)),
    "context": ([5, 70, 33], [64, 1, 300], 2, (32, 16, 32)),
    "requests without keys": ([3, 40, 2], [0, 20, 0], 1, (16, 16, 16)),
    "DeepSeek-V3": ([17, 5], [170, 20], 1, (128, 64, 128)),
    "GLM-5": ([9, 70], None, 1, (192, 64, 256)),
}


def draw_mask(num_tokens: int, num_keys: int) -> Tensor:
    """Return rows of all bits, none, one, few, and of few among the last or the first keys: tiles before or after them
    are empty.
    """
    bits = torch.rand(num_tokens, num_keys, generator=torch.Generator().manual_seed(2)) < 0.1
    bits[1::7], bits[2::7], bits[3::7] = True, False, False
    bits[3::7, num_keys // 2] = True
    bits[4::7, : num_keys - num_keys // 4] = False
    bits[5::7, num_keys // 4 :] = False
    padded = torch.nn.functional.pad(bits, (0, -num_keys % 32)).unflatten(1, (-1, 32))
    return (padded.long() << torch.arange(32)).sum(-1).to(torch.int32)


def check_in_the_interpreter() -> None:
    from dcpmla.attention.triton import prefill as kernels

    check_mask_kernel("cpu")
    for case in CASES.values():
        check_prefill(kernels.run, case, torch.float16, "cpu", draw_mask)
    for tiling in kernels.TILINGS[1:]:  # half a word of keys, one, two
        kernels.TILINGS = (tiling,)
        check_prefill(kernels.run, CASES["causal"], torch.float16, "cpu", draw_mask)


def test_in_the_interpreter() -> None:
    run_interpreted(1, check_in_the_interpreter)


def test_mask_kernel_compiles_for_hopper() -> None:
    from dcpmla.attention.triton.mask import selection_mask_kernel

    ptx_for_hopper(selection_mask_kernel, "i32", {"TOPK": 2048, "BLOCK": 2048})


def test_a_mask_passes_over_kernels_that_take_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU where all kernels of prefill could run, and on one that is no Hopper."""
    for name in ("_half_on_gpu_obstacle", "_missing_flashinfer"):
        monkeypatch.setattr(obstacles, name, lambda *_: "")
    rows = torch.empty(1, 1, 192), torch.empty(1, 64), torch.empty(1, 1, 128)
    masks = None, torch.zeros(1, 1, dtype=torch.int32)
    for obstacle, expected in (("", ["hopper", "hopper"]), ("no Hopper", ["flashinfer", "triton"])):
        monkeypatch.setattr(obstacles, "_hopper_gpu_obstacle", lambda *_, obstacle=obstacle: obstacle)
        for mask, name in zip(masks, expected, strict=True):
            call = prefill_call(*rows, mask)
            assert next(backend.name for backend in PREFILL_BACKENDS if not backend.obstacle(call)) == name


def check_operators(device: str, dtype: torch.dtype) -> None:
    """Check schema and the shapes of tracing: `torch.library.opcheck`."""
    lens, generator = segments([3, 1], device), torch.Generator().manual_seed(0)
    positions = select([8, 9, 10, 4], 5).to(device)
    torch.library.opcheck(
        selection_mask.op, (positions, lens.start_loc, torch.tensor([7, 0], dtype=torch.int32, device=device), 40)
    )
    rows = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((4, 2, 24), (4, 2, 16), (4, 8), (4, 2, 16))
    )
    call = PrefillCall(*rows, *lens, *lens, SCALE, True, draw_mask(4, 3).to(device))
    torch.library.opcheck(operators.mha_prefill.op, tuple(call))


def test_operators() -> None:
    check_operators("cpu", torch.float32)


# ---- on GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES | LARGER_CASES)
@pytest.mark.parametrize("name", MASKED_BACKENDS)
def test_masked_kernel_on_a_gpu(name: str, case: str, dtype: torch.dtype) -> None:
    lens_and_dims = (CASES | LARGER_CASES)[case]
    check_prefill(find_kernel(name, lens_and_dims[3], dtype), lens_and_dims, dtype, "cuda", draw_mask)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKED_BACKENDS)
def test_a_mask_of_all_keys_on_a_gpu(name: str) -> None:
    """The same result as without a mask, although bits past a request's keys are set."""
    mha_prefill = as_kernel(find_kernel(name, DEEPSEEK, torch.bfloat16), PrefillCall)
    generator = torch.Generator("cuda").manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    for query_lens, key_lens in (([300, 1, 129], [300, 1, 129]), ([300, 1, 129], [64, 0, 777])):
        queries, keys = segments(query_lens, "cuda"), segments(key_lens, "cuda")
        num_tokens, num_keys = queries.start[-1], keys.start[-1]
        call = rows(num_tokens, 5, 192), rows(num_keys, 5, 128), rows(num_keys, 64), rows(num_keys, 5, 128)
        mask = torch.full((num_tokens, -(-max(key_lens) // 32)), -1, dtype=torch.int32, device="cuda")
        sizes = *queries, *keys, SCALE, query_lens == key_lens
        (out, lse), (expected, expected_lse) = mha_prefill(*call, *sizes, mask), mha_prefill(*call, *sizes)
        torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-2)
        torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKED_BACKENDS)
def test_masks_past_2_31_words(name: str) -> None:
    """Rows of a mask whose offset in words takes more than 32 bits."""
    mha_prefill = as_kernel(find_kernel(name, DEEPSEEK, torch.bfloat16), PrefillCall)
    num_tokens, num_keys = 65_600, 200
    mask = torch.zeros(num_tokens, 32_800, device="cuda", dtype=torch.int32)  # 8.6 GB
    mask[-1, 5] = 1 << 7
    kv = torch.randn(num_keys, 1, 256, device="cuda", dtype=torch.bfloat16)
    k_pe = torch.randn(num_keys, 64, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(num_tokens, 1, 192, device="cuda", dtype=torch.bfloat16)
    queries, keys = segments([num_tokens], "cuda"), segments([num_keys], "cuda")
    out, lse = mha_prefill(q, kv[..., :128], k_pe, kv[..., 128:], *queries, *keys, SCALE, False, mask)
    assert torch.equal(out[-1], kv[5 * 32 + 7, :, 128:])
    assert lse[-1].isfinite().all()
    assert not out[:-1].any()
    assert (lse[:-1] == -torch.inf).all()


@pytest.mark.gpu
def test_operators_on_a_gpu() -> None:
    check_mask_kernel("cuda")
    check_operators("cuda", torch.bfloat16)
