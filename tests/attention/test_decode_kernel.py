"""Decode kernels against the reference in float64 on a GPU, also over rows of shared keys; without one, the portable
in the interpreter.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dcpmla.attention.backends.calls import decode_workspace
from dcpmla.attention.backends.choice import DECODE_BACKENDS, find_backend, select_backend
from dcpmla.attention.triton.decode import run
from dcpmla.cache import formats
from tests.support.backends import as_kernel, checked_call, decode, decode_call, in_parts
from tests.support.decode_cases import (
    QUANTIZED,
    SHARED_FORMATS,
    SMALL,
    Case,
    SharedCase,
    check,
    long_case,
    ones,
    ragged,
)
from tests.support.ranks import on_ranks
from tests.support.shared_memory import run_interpreted

FP8 = {**SMALL, "format": "fp8"}
WIDE = {**SMALL, "kv_lora_rank": 1024, "block_size": 1}
SHARED: dict[str, Any] = {"dtype": torch.float16}  # the interpreter multiplies bfloat16 as integers
DS_MLA = {**SMALL, "format": "fp8_ds_mla", "kv_lora_rank": 256}
INTERPRETED = [
    Case([(1, 5), (1, 0), (1, 300), (1, 64)], num_heads=3, num_programs=2, **SMALL),
    Case([(1, 700)], num_heads=20, num_programs=3, **{**SMALL, "block_size": 1}),
    Case([(2, 33), (2, 2), (2, 1)], num_heads=4, num_programs=2, **SMALL),
    Case([(3, 140), (1, 0), (2, 65), (4, 3)], num_heads=9, num_programs=2, is_sharded=True, **SMALL),
    Case([(1, 0), (1, 0)], num_heads=1, num_programs=1, **SMALL),
    Case([(1, 17)], num_heads=70, num_programs=1, kv_lora_rank=64, rope=64, block_size=48, dtype=torch.float16),
    Case([(1, 5), (1, 0), (1, 300), (1, 64)], num_heads=3, num_programs=2, **{**FP8, "block_size": 1}),
    Case(
        [(3, 140), (1, 0), (2, 65), (4, 3)], num_heads=9, num_programs=2, is_sharded=True, has_fp8_queries=True, **FP8
    ),
    Case([(1, 5), (1, 0), (1, 300), (1, 64)], num_heads=3, num_programs=2, **{**DS_MLA, "block_size": 1}),
    Case([(3, 140), (1, 0), (2, 65), (4, 3)], num_heads=9, num_programs=2, is_sharded=True, **DS_MLA),
    Case([(1, 700), (1, 0), (1, 9)], num_heads=40, num_programs=2, **WIDE),
    Case([(1, 90), (7, 140), (1, 0), (5, 65)], num_heads=9, num_programs=2, is_sharded=True, max_query_len=3, **SMALL),
    Case([(6, 140), (3, 65)], num_heads=40, num_programs=2, max_query_len=1, **SMALL),
    SharedCase(ones(5, 0, 300, 64), num_heads=3, num_programs=2, kv_lora_rank=32, **SHARED),
    SharedCase(ones(700), num_heads=20, num_programs=3, kv_lora_rank=16, **SHARED),
    SharedCase(ones(5, 0, 300, 64), num_heads=3, num_programs=2, kv_lora_rank=128, format="fp8_ds_mla", **SHARED),
    SharedCase(ones(65, 1), num_heads=17, num_programs=2, kv_lora_rank=512, format="fp8_ds_mla", **SHARED),
]


@on_ranks(1, run_interpreted)
def test_the_portable_kernel_in_the_interpreter() -> None:
    for case in INTERPRETED:
        joined = check(as_kernel(run, checked_call), case, "cpu")
        if case.rope:
            inputs = case.inputs("cpu")
            parts = run(checked_call(**{**inputs, "q": in_parts(inputs["q"], case.kv_lora_rank)}))
            assert all(map(torch.equal, joined, parts)), case


# One class of shapes a line: what broke other kernels, and what tiles and splits make special.
ON_GPU = [
    Case([(1, 1)]),
    Case([(1, 0), (1, 63), (1, 64), (1, 65), (1, 0), (1, 128), (1, 4000)]),
    Case([(1, 0), (1, 0), (1, 0)], num_heads=16),
    long_case(1, 4096),
    long_case(1, 65536),
    long_case(8, 4096),
    long_case(37, 3000, num_heads=64),
    long_case(33, 2000, num_heads=16),
    long_case(300, 300, num_heads=128),
    long_case(5, 2000, num_heads=96),
    long_case(5, 2000, num_heads=1),
    long_case(3, 5000, num_heads=192),
    long_case(9, 3000, dtype=torch.float16),
    long_case(9, 3000, block_size=128),
    long_case(9, 3000, block_size=16),
    long_case(9, 3000, block_size=48, num_heads=16),
    Case([(1, 2048)], block_size=1),
    Case([(1, 0), (1, 63), (1, 64), (1, 65), (1, 1), (1, 2048)], block_size=1),
    long_case(5, 512, block_size=1, num_heads=16),
    long_case(200, 300, block_size=1, num_heads=64),
    long_case(9, 3000, block_size=1, dtype=torch.float16),
    Case([(2, 4097), (2, 2), (2, 129), (2, 1)]),
    Case([(4, 3000)] * 9, num_heads=16),
    Case([(3, 3000), (1, 0), (2, 65), (4, 3), (1, 777)], is_sharded=True),
    Case([(3, 3000), (1, 0), (2, 65), (4, 3), (1, 777)], num_heads=16, is_sharded=True),
    Case([(40, 3000)], num_heads=128, is_sharded=True),
    Case([(1, 3000)] * 5, num_heads=128, num_programs=8),
    Case([(1, 4097), (61, 3000), (1, 0), (9, 65)], num_heads=16, is_sharded=True, max_query_len=8),
    Case([(1, 4097), (4, 700), (61, 3000), (1, 0), (2, 65)], num_heads=128, is_sharded=True, max_query_len=1),
    Case([(17, 200)] * 3, num_heads=64, block_size=16, is_sharded=True, max_query_len=2),
    long_case(9, 3000, num_heads=64, kv_lora_rank=1024),
    Case([(3, 2048), (1, 0), (2, 65), (1, 1)], num_heads=40, block_size=1, is_sharded=True, kv_lora_rank=1024),
]
ON_GPU += [replace(case, **kind) for kind in QUANTIZED for case in ON_GPU]
ON_GPU += [
    SharedCase(requests, num_heads=num_heads, dtype=dtype, format=format)
    for format in SHARED_FORMATS
    for requests, num_heads, dtype in (
        (ones(1), 64, torch.bfloat16),
        (ones(0, 1, 63, 64, 65, 640, 1100, 0), 64, torch.bfloat16),
        (ones(0, 1, 63, 64, 65, 640, 1100, 0), 128, torch.float16),
        (ones(0, 0), 16, torch.bfloat16),
        (ones(1100), 128, torch.bfloat16),
        (ones(4000), 8, torch.bfloat16),
        (ragged(7, 1100), 8, torch.bfloat16),
        (ragged(37, 1100), 16, torch.bfloat16),
        (ragged(64, 640), 128, torch.bfloat16),
        (ragged(130, 1152), 64, torch.bfloat16),
        (ones(*[640] * 128), 64, torch.bfloat16),
        (ragged(130, 200), 96, torch.float16),
    )
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "backend"),
    [(case, backend) for case in ON_GPU for backend in ("hopper", "triton")],
    ids=lambda x: x if isinstance(x, str) else f"{len(x.requests)}x{x.requests[0][1]}x{x.num_heads}-{x.format}",
)
def test_kernels_against_float64(case: Case, backend: str) -> None:
    chosen = find_backend(DECODE_BACKENDS, backend)
    if obstacle := chosen.obstacle(checked_call(**case.inputs("cuda"))):
        assert backend != "triton"
        assert not isinstance(case, SharedCase) or torch.cuda.get_device_capability()[0] != 9
        pytest.skip(f"{backend}: {obstacle}")
    # e4m3 probabilities are off by 2^-4 at most, a row's error by less; sums of fp8 products keep 13 bits behind the
    # point or so.
    is_fp8 = backend == "hopper" and case.has_fp8_queries
    check(as_kernel(chosen.run, checked_call), case, "cuda", *((0.05, 0.02) if is_fp8 else ()))


def test_gpus_and_caches_that_the_portable_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs that do not convert e4m3, and where rows do not align, torch takes what is quantized."""
    with FakeTensorMode():
        half, bfloat, fp8 = (
            torch.empty(3, 16, 576, device="cuda", dtype=dtype)
            for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
        )
        ds_mla, odd = (torch.empty(3, 16, width, device="cuda", dtype=torch.uint8) for width in (656, 657))
    for capability, q, kv_cache, taken in (
        ((8, 0), half, half, True),
        ((8, 0), half, bfloat, False),
        ((8, 9), half, bfloat, False),
        ((8, 0), bfloat, fp8, False),
        ((8, 9), bfloat, fp8, True),
        ((8, 0), fp8, fp8, False),
        ((8, 9), fp8, fp8, True),
        ((9, 0), fp8, bfloat, False),
        ((8, 0), half, ds_mla, False),
        ((8, 9), half, odd, False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        dtype = torch.bfloat16 if q is fp8 else q.dtype
        call = decode_call(q, kv_cache, 512, dtype)
        assert (select_backend(DECODE_BACKENDS, call).name == "triton") == taken, (
            capability,
            q.dtype,
            kv_cache.dtype,
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        *(long_case(8, 4096, **kind) for kind in ({}, *QUANTIZED)),
        *(SharedCase(ragged(9, 1100), num_heads=64, format=format) for format in SHARED_FORMATS),
    ],
    ids=lambda case: f"{type(case).__name__}-{case.format}-{case.has_fp8_queries}",
)
def test_a_graph_replays_with_other_lengths(case: Case) -> None:
    """One graph serves other lengths, rows and scales than it was captured with, which are the device's, with the same
    bits as eager calls.
    """
    inputs = {**case.inputs("cuda"), "workspace": decode_workspace("cuda")}
    decode(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode(**inputs)
    lens, table = inputs["seq_lens"].clone(), inputs["block_table"].clone()
    for number, divisor in enumerate((4096, 64, 3, 1)):  # from lengths of 0 and 1 on
        inputs["seq_lens"].copy_((lens // divisor).roll(number))
        inputs["block_table"].copy_(table.roll(number, 0))
        for scale in (inputs["kv_scale"], inputs["q_scale"]):
            if scale is not None:
                scale.mul_(0.7)
        graph.replay()
        eager, eager_lse = decode(**inputs)
        assert torch.equal(out, eager)
        assert torch.equal(lse, eager_lse)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        *(("hopper", kind) for kind in [{}, {"block_size": 1}, *QUANTIZED]),
        *(("triton", kind) for kind in [{}, *QUANTIZED]),
    ],
)
def test_nan_of_a_key_is_not_lost(backend: str, kind: dict[str, Any]) -> None:
    """Not taken for a request without keys: its LSE would say so, and a merge over ranks would drop them without a
    word.
    """
    inputs = long_case(3, 3000, **kind).inputs("cuda")
    inputs["kv_cache"].view(torch.uint8)[inputs["block_table"][1, 2], 5 % inputs["kv_cache"].shape[1], :2] = 0xFF
    out, lse = find_backend(DECODE_BACKENDS, backend).run(checked_call(**inputs))
    assert lse.isnan().any(-1).tolist() == out.isnan().any(-1).any(-1).tolist() == [False, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [{}, *QUANTIZED])
def test_the_operator_on_a_gpu(kind: dict[str, Any]) -> None:
    inputs = {**long_case(5, 2000, **kind).inputs("cuda"), "workspace": decode_workspace("cuda")}
    args = (*checked_call(**inputs), *[None] * 6)
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if inputs["kv_cache"].dtype != formats.FP8:  # which torch 2.11 cannot compare
        checks.append("test_schema")
    torch.library.opcheck(torch.ops.dcpmla.mla_decode.default, args, test_utils=checks)
