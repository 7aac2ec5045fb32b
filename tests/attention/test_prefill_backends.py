"""Every backend of prefill that there is, on GPUs against float64; FlashInfer's requests without keys."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dcpmla.attention.backends import flashinfer, reference
from dcpmla.attention.backends.calls import PrefillCall
from dcpmla.attention.backends.choice import PREFILL_BACKENDS, find_backend
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from tests.attention.test_prefill_kernel import (
    CASES,
    check_merge_part,
    check_neighbours,
    check_operators,
    check_unaligned,
)
from tests.support.backends import as_kernel, prefill_call, up
from tests.support.prefill_checks import SCALE, Case, check_prefill, segments

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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES | LARGER_CASES)
@pytest.mark.parametrize("name", [backend.name for backend in PREFILL_BACKENDS])
def test_backend_on_a_gpu(name: str, case: str, dtype: torch.dtype) -> None:
    lens_and_dims = (CASES | LARGER_CASES)[case]
    check_prefill(find_kernel(name, lens_and_dims[3], dtype), lens_and_dims, dtype, "cuda")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_unaligned("cuda")
    check_neighbours("triton", (16, 16, 16), "cuda")
    check_merge_part("cuda")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check_operators("cuda", dtype)


@pytest.mark.gpu
def test_neighbours_on_hopper() -> None:
    find_kernel("hopper", DEEPSEEK, torch.float16)
    check_neighbours("hopper", DEEPSEEK, "cuda")


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
@pytest.mark.parametrize("workspace", [64, 4096])
def test_dcp_mla_prefill_on_a_gpu(workspace: int) -> None:
    """The whole path in bfloat16, heads of DeepSeek-V3, context in many chunks or one, against the same in float64 on
    the CPU.
    """
    from dcpmla import DCPConfig, dcp_mla_prefill
    from dcpmla.comm.exchange import LocalExchange

    query_lens, seq_lens, num_heads = [150, 7, 33], [450, 7, 40], 4
    dcp = DCPConfig(block_size=16, context_workspace_tokens=workspace)
    tables = [list(range(29)), [29], [32, 31, 30]]
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    inputs = (
        rows(190, num_heads, 192),
        rows(190, 512),
        rows(190, 64),
        rows(33, 16, 576),
        rows(num_heads, 256, 512) / 512**0.5,
    )

    def run(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        prefill = StepBuilder(dcp, 0, device).build(StepRequests(query_lens, seq_lens, tables)).prefill
        assert prefill is not None
        assert len(prefill.context_chunks) == (5 if workspace == 64 else 1)
        *rows, w_kv_b = (tensor.to(device, dtype) for tensor in inputs)
        out, lse = dcp_mla_prefill(*rows, up(w_kv_b), prefill, 192**-0.5, LocalExchange())
        return out.double().cpu(), lse.cpu()

    (out, lse), (wanted, wanted_lse) = run("cuda", torch.bfloat16), run("cpu", torch.float64)
    assert (out - wanted).norm() < 1e-2 * wanted.norm()
    torch.testing.assert_close(lse, wanted_lse, atol=2e-2, rtol=2e-3)
