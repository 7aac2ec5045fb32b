"""Every backend of prefill that there is, on GPUs against float64, also under a mask; FlashInfer's requests without
keys.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla import DCPConfig, dcp_mla_prefill
from dcpmla.attention.backends import flashinfer, reference
from dcpmla.attention.backends.calls import PrefillCall
from dcpmla.attention.backends.choice import PREFILL_BACKENDS, find_backend
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.comm.exchange import LocalExchange
from tests.attention.test_prefill_kernel import CASES, MASKED, check_neighbours
from tests.attention.test_selection_mask import select, seq_lens_of_tokens
from tests.support.backends import as_kernel, prefill_call, up
from tests.support.prefill_checks import SCALE, Case, check_prefill, draw_mask, segments

DEEPSEEK = (128, 64, 128)  # P, R, V
LARGER_CASES: dict[str, Case] = {  # for GPUs: lengths around tiles of 64 and 128, more heads than run side by side
    "lengths around a tile": ([1, 63, 0, 64, 127, 128, 129, 1000], None, 9, (128, 64, 128)),
    "long": ([4097], None, 2, (128, 64, 128)),
    "context, lengths around a tile": ([129, 3, 0, 7, 64, 65], [511, 128, 5, 0, 4097, 1], 9, (128, 64, 128)),
}


def find_kernel(
    name: str, dims: tuple[int, int, int], dtype: torch.dtype
) -> Callable[[PrefillCall], tuple[Tensor, Tensor]]:
    """Return a backend's `run`; skip the test where it does not take such heads on this GPU."""
    backend = find_backend(PREFILL_BACKENDS, name)
    q, k_pe, v = (torch.empty(1, 1, dim, dtype=dtype, device="cuda") for dim in (sum(dims[:2]), *dims[1:]))
    if obstacle := backend.obstacle(prefill_call(q, k_pe[0], v)):
        pytest.skip(f"{name}: {obstacle}")
    return backend.run


class FlashInferPlan:
    """Of FlashInfer, as seen on a GPU: LSE in base 2, and no (0, -inf) for requests without keys."""

    def __init__(self, query_start: tuple[int, ...], key_start: tuple[int, ...], causal: bool) -> None:
        self.bounds, self.causal = (query_start, key_start), causal

    def run(self, q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
        assert return_lse
        out, lse = reference.mha_prefill(q, k, v, *self.bounds, SCALE, self.causal)
        is_empty = lse == -torch.inf
        return out.masked_fill(is_empty[..., None], torch.nan), (lse / math.log(2)).masked_fill(is_empty, 0.0)


def test_flashinfers_requests_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "_plan_prefill", lambda *plan: FlashInferPlan(plan[0], plan[1], plan[6]))
    check_prefill(flashinfer.run_prefill, CASES["DeepSeek-V3, requests without keys"], torch.bfloat16, "cpu")


BACKENDS = [backend.name for backend in PREFILL_BACKENDS]
MASKED_BACKENDS = "hopper", "triton"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "case", "mask"),
    [
        *((name, case, None) for name in BACKENDS for case in CASES | LARGER_CASES),
        *((name, case, draw_mask) for name in MASKED_BACKENDS for case in (*MASKED, *LARGER_CASES)),
    ],
)
def test_backend_on_a_gpu(name: str, case: str, mask: Any, dtype: torch.dtype) -> None:
    lens_and_dims = (CASES | LARGER_CASES)[case]
    check_prefill(find_kernel(name, lens_and_dims[3], dtype), lens_and_dims, dtype, "cuda", mask)


@pytest.mark.gpu
def test_neighbours_on_hopper() -> None:
    find_kernel("hopper", DEEPSEEK, torch.float16)
    check_neighbours("cuda", "hopper", DEEPSEEK)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_in_a_graph(name: str) -> None:
    """No sync with the host: it can be captured, and a replay reads the starts anew."""
    mha_prefill = as_kernel(find_kernel(name, DEEPSEEK, torch.bfloat16), PrefillCall)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k_nope, v = (
        torch.randn(200, 2, dim, device="cuda", dtype=torch.bfloat16, generator=generator) for dim in (192, 128, 128)
    )
    k_pe = torch.randn(200, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
    captured, other = segments([150, 50], "cuda"), segments([30, 170], "cuda")
    wanted = mha_prefill(q, k_nope, k_pe, v, *other, *other, SCALE, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = mha_prefill(q, k_nope, k_pe, v, *captured, *captured, SCALE, True)
    captured.start_loc.copy_(other.start_loc)
    graph.replay()
    torch.testing.assert_close(got, wanted, atol=0, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_past_2_31_elements(name: str) -> None:
    """Keys whose offset in elements takes more than 32 bits."""
    mha_prefill = as_kernel(find_kernel(name, DEEPSEEK, torch.bfloat16), PrefillCall)
    num_keys, num_heads = 90_000, 128
    kv = torch.zeros(num_keys, num_heads, 256, device="cuda", dtype=torch.bfloat16)  # 5.9 GB
    k_pe = torch.zeros(num_keys, 64, device="cuda", dtype=torch.bfloat16)
    q = torch.ones(2, num_heads, 192, device="cuda", dtype=torch.bfloat16)
    kv[-1, :, :128], kv[-1, :, 128:] = 1.0, 7.0  # the last key alone counts
    queries, keys = segments([1, 1], "cuda"), segments([num_keys - 5, 5], "cuda")
    out, lse = mha_prefill(q, kv[..., :128], k_pe, kv[..., 128:], *queries, *keys, 1.0, False)
    torch.testing.assert_close(out[1], torch.full_like(out[1], 7.0))
    torch.testing.assert_close(lse[1], torch.full_like(lse[1], 128.0))
    torch.testing.assert_close(out[0], torch.zeros_like(out[0]))


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
@pytest.mark.parametrize("workspace", [1024, 65536])
@pytest.mark.parametrize(
    ("dims", "topk"),
    [(DEEPSEEK, None), (DEEPSEEK, 2048), ((192, 64, 256), 2048)],
    ids=["DeepSeek-V3", "DeepSeek-V3.2", "GLM-5"],
)
def test_dcp_mla_prefill_on_a_gpu(dims: tuple[int, int, int], topk: int | None, workspace: int) -> None:
    """The whole path in bfloat16, heads and top-k of real models, context in many chunks or one, against the same in
    float64 on the CPU.
    """
    nope, rope, v_head_dim = dims
    query_lens, seq_lens, num_heads = [600, 7, 130], [4700, 7, 2200], 2
    dcp = DCPConfig(block_size=64, context_workspace_tokens=workspace)
    counts = [-(-length // 64) for length in seq_lens]
    tables = [list(range(sum(counts[:i]), sum(counts[: i + 1])))[::-1] for i in range(3)]
    generator = torch.Generator().manual_seed(0)
    positions = None if topk is None else select(seq_lens_of_tokens(query_lens, seq_lens), topk)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    num_tokens = sum(query_lens)
    latents = rows(num_tokens, 512), rows(num_tokens, rope), rows(sum(counts), 64, 512 + rope)
    inputs = rows(num_tokens, num_heads, nope + rope), *latents, rows(num_heads, nope + v_head_dim, 512) / 512**0.5

    def run(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        prefill = StepBuilder(dcp, 0, device).build(StepRequests(query_lens, seq_lens, tables)).prefill
        assert (len(prefill.context_chunks) > 1) == (workspace == 1024)
        *cast, w_kv_b = (tensor.to(device, dtype) for tensor in inputs)
        selected = None if positions is None else positions.to(device)
        scale, exchange = (nope + rope) ** -0.5, LocalExchange()
        out, lse = dcp_mla_prefill(*cast, up(w_kv_b), prefill, scale, exchange, selected_positions=selected)
        return out.double().cpu(), lse.cpu()

    (out, lse), (wanted, wanted_lse) = run("cuda", torch.bfloat16), run("cpu", torch.float64)
    assert (out - wanted).norm() < 1e-2 * wanted.norm()
    torch.testing.assert_close(lse, wanted_lse, atol=2e-2, rtol=2e-3)
