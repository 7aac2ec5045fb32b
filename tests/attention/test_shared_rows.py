"""Decode over rows of shared keys (DeepSeek-V4).

Kernels are compared with the reference in float64 on a GPU; without one, the portable one in the interpreter.
`test_decode_compile` compiles them for Hopper.
"""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.attention.backends import reference
from dcpmla.attention.backends.calls import DecodeCall
from dcpmla.attention.backends.choice import DECODE_BACKENDS, find_backend, select_backend
from dcpmla.attention.mla.decode import dcp_mla_decode
from dcpmla.cache.shared_format import rows_shape
from dcpmla.cache.shared_rows import read_rows, write_rows
from dcpmla.comm.exchange import LocalExchange
from tests.attention.test_reference import attend
from tests.support.backends import as_kernel, checked_call, decode, unchecked_call
from tests.support.decode_cases import NOWHERE, Case, check, compare
from tests.support.shared_memory import run_interpreted

triton = pytest.importorskip("triton")


def _half(cache: Tensor, page: list[int]) -> Tensor:
    """Return the first halves of a cache's rows [num_pages, ...] as pages."""
    return cache[:, : page[0] * page[1]].unflatten(1, page)


@dataclass
class SharedCase(Case):
    """Query tokens that attend to as many rows of one cache as `requests` say, some of them to the same ones.

    Their format is the dtype's or fp8_ds_mla. What no token attends to is NaN, tables and pages are slices of larger
    ones, and entries of a table past the last one point nowhere.
    """

    rope: int = 0

    def inputs(self, device: str, seed: int = 0) -> dict[str, Any]:
        generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
        width, lens = self.kv_lora_rank, [num_keys for _, num_keys in self.requests]
        used = max([*lens, 1]) + 70
        storage = torch.uint8 if self.format == "fp8_ds_mla" else self.dtype
        num, *page = rows_shape(2 * used, width, storage)
        cache = torch.full((num, 2 * page[0] * page[1] * storage.itemsize), 0xFF, dtype=torch.uint8).view(storage)
        slots = torch.tensor(draw.sample(range(2 * used), used))
        write_rows(_half(cache, page), torch.randn(used, width, generator=generator), slots)
        table = torch.full((len(lens), max([*lens, 1]) + 9), NOWHERE, dtype=torch.int32)
        for row, length in zip(table[:, 4:], lens, strict=True):
            row[:length] = slots[torch.randperm(used, generator=generator)[:length]]
        q = torch.randn(len(lens), self.num_heads, width, generator=generator).to(self.dtype)
        tensors = {"q": q, "seq_lens": torch.tensor(lens, dtype=torch.int32), "workspace": self.new_workspace(device)}
        on_device = {name: tensor if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
        on_device["kv_cache"], on_device["block_table"] = _half(cache.to(device), page), table.to(device)[:, 4:]
        more = dict.fromkeys(("request_index", "query_start_loc", "kv_scale", "q_scale"))
        numbers = {"softmax_scale": width**-0.5, "kv_lora_rank": width, "max_query_len": 1, "dtype": self.dtype}
        return {**on_device, **more, **numbers}

    def answer(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return reference.mla_decode(unchecked_call(**{**inputs, "q": inputs["q"].double(), "dtype": torch.float64}))


def ones(*lens: int) -> list[tuple[int, int]]:
    return [(1, length) for length in lens]


def ragged(num_tokens: int, longest: int) -> list[tuple[int, int]]:
    draw = random.Random(num_tokens + longest)
    return ones(*(draw.choice([0, 1, 63, 64, 65, draw.randint(0, longest), longest]) for _ in range(num_tokens)))


WIDTHS: dict[str, Any] = {"kv_lora_rank": 128, "dtype": torch.float32}
FORMATS = ["auto", "fp8_ds_mla"]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_reference(format: str, dtype: torch.dtype) -> None:
    """Against attention written out in float64, over the rows that `read_rows` gives."""
    case = SharedCase(ones(5, 0, 70, 1), num_heads=3, format=format, kv_lora_rank=128, dtype=dtype)
    inputs = case.inputs("cpu")
    out, lse = decode(**inputs)
    assert (out.shape, out.dtype) == ((4, 3, 128), dtype)
    for token, length in enumerate([5, 0, 70, 1]):
        slots = inputs["block_table"][token, :length].long()
        rows = read_rows(inputs["kv_cache"], slots, 128, torch.float64)
        for head in range(3):
            wanted, wanted_lse = attend(inputs["q"][token, head], rows, rows, case.kv_lora_rank**-0.5)
            tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(out[token, head].double(), wanted, atol=tolerance, rtol=tolerance)
            assert float(lse[token, head]) == pytest.approx(wanted_lse, abs=1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_attention_in_parts(format: str) -> None:
    """`dcp_mla_decode` takes the cache as it is, and merged parts of the rows are the whole."""
    from dcpmla import merge_partials

    inputs = SharedCase(ones(50, 20, 3), num_heads=2, format=format, **WIDTHS).inputs("cpu")
    q, cache, table, lens = (inputs[name] for name in ("q", "kv_cache", "block_table", "seq_lens"))
    whole = decode(**inputs)
    parts = []
    for first, part in ((0, lens // 3), (lens // 3, lens - lens // 3)):
        index = torch.arange(table.shape[1]) + (first if isinstance(first, int) else first[:, None])
        mine = table.gather(1, index.expand(len(q), -1).clamp(max=table.shape[1] - 1))
        call = DecodeCall(q, None, cache, mine, part.to(torch.int32), inputs["softmax_scale"], 128)
        parts.append(dcp_mla_decode(call, LocalExchange()))
    out, lse = zip(*parts, strict=True)
    for got, wanted in zip(merge_partials(torch.stack(out), torch.stack(lse)), whole, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "kv_cache",
            lambda cache: cache[..., :-1],
            r"^kv_cache has shape .*; expected \[num_pages, 64, 201\] .* fp8",
        ),
        ("kv_cache", lambda cache: cache.flatten(0, 1)[:, None], r"^kv_cache has shape .*; expected \[num_pages, 64"),
        ("kv_cache", lambda cache: torch.zeros(9, 1, 64), r"^kv_cache has shape .*; expected \[num_blocks, .*, 128\]"),
        ("kv_cache", lambda cache: torch.zeros(9, 1, 128).bfloat16(), "^kv_cache has dtype torch.bfloat16; expected"),
        ("kv_cache", lambda cache: torch.zeros(9, 1, 128).to(torch.float8_e4m3fn), "^q has dtype .* of shared keys"),
        ("q", lambda q: q.to(torch.float8_e4m3fn), "^q has dtype torch.float8_e4m3fn .* of shared keys"),
        ("kv_scale", lambda _: torch.ones(1), "^kv_scale is given for a cache of torch.uint8"),
    ],
)
def test_what_does_not_belong_together(name: str, change: Any, message: str) -> None:
    inputs = SharedCase(ones(5, 1), num_heads=2, format="fp8_ds_mla", **WIDTHS).inputs("cpu")
    decode(**inputs)
    with pytest.raises(ValueError, match=message):
        decode(**{**inputs, name: change(inputs[name])})


SMALL: dict[str, Any] = {"dtype": torch.float16}  # the interpreter multiplies bfloat16 as integers
INTERPRETED = [
    SharedCase(ones(5, 0, 300, 64), num_heads=3, num_programs=2, kv_lora_rank=32, **SMALL),
    SharedCase(ones(700), num_heads=20, num_programs=3, kv_lora_rank=16, **SMALL),
    SharedCase(ones(5, 0, 300, 64), num_heads=3, num_programs=2, kv_lora_rank=128, format="fp8_ds_mla", **SMALL),
    SharedCase(ones(65, 1), num_heads=17, num_programs=2, kv_lora_rank=512, format="fp8_ds_mla", **SMALL),
]


def check_in_the_interpreter() -> None:
    from dcpmla.attention.triton.decode import run

    for case in INTERPRETED:
        check(as_kernel(run, checked_call), case, "cpu")


def test_the_portable_kernel_in_the_interpreter() -> None:
    run_interpreted(1, check_in_the_interpreter)


ON_GPU = [
    SharedCase(requests, num_heads=num_heads, dtype=dtype, format=format)
    for format in FORMATS
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
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("case", ON_GPU, ids=lambda x: f"{len(x.requests)}x{x.requests[0][1]}x{x.num_heads}-{x.format}")
def test_kernels_against_float64(case: SharedCase, backend: str) -> None:
    chosen = find_backend(DECODE_BACKENDS, backend)
    if backend == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("kernels for Hopper")
    assert not chosen.obstacle(checked_call(**case.inputs("cuda")))
    check(as_kernel(chosen.run, checked_call), case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_are_exact(dtype: torch.dtype) -> None:
    """A query that sees one row gives it: each code, subnormal ones too, times each scale that dtypes can hold."""
    codes = torch.tensor([code for code in range(256) if code not in (0x7F, 0xFF)], dtype=torch.uint8)  # without NaN
    cache = torch.zeros(rows_shape(64, 512, torch.uint8), dtype=torch.uint8)
    data, scales = cache.flatten(1)[0, : 64 * 576].view(64, 576), cache.flatten(1)[0, 64 * 576 : 64 * 584].view(64, 8)
    data[:, :448] = codes[torch.arange(64 * 448) % len(codes)].view(64, 448)
    data[:, 448:] = torch.randn(64, 64).bfloat16().view(torch.uint8)
    bounds = (20, 245) if dtype == torch.bfloat16 else (112, 133)
    scales[:, :7] = torch.linspace(*bounds, 448).round().to(torch.uint8).view(64, 7)
    numbers = torch.arange(64, dtype=torch.int32)
    wanted = read_rows(cache, numbers.long(), 512, dtype)[:, None].expand(64, 16, 512)
    assert wanted.isfinite().all()
    tensors = torch.zeros(64, 16, 512, dtype=dtype), cache, numbers[:, None], torch.ones(64, dtype=torch.int32)
    for backend in ("hopper", "triton") if torch.cuda.get_device_capability()[0] == 9 else ("triton",):
        out, _ = decode(*(tensor.cuda() for tensor in tensors), softmax_scale=1.0, backend=backend)
        assert torch.equal(out.cpu(), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_a_graph_replays_with_other_lengths(format: str) -> None:
    """A graph serves other lengths and rows than it was captured with; "auto" takes the kernel for Hopper there."""
    case = SharedCase(ragged(9, 1100), num_heads=64, format=format)
    inputs = case.inputs("cuda")
    table = inputs["block_table"]
    table.copy_(table.where(table != NOWHERE, table[table != NOWHERE][0]))
    if torch.cuda.get_device_capability()[0] == 9:
        assert select_backend(DECODE_BACKENDS, checked_call(**inputs)).name == "hopper"
    decode(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode(**inputs)
    for lens in (inputs["seq_lens"].flip(0), inputs["seq_lens"].roll(1)):
        inputs["seq_lens"].copy_(lens)
        table.copy_(table.roll(1, 0))
        graph.replay()
        compare((out, lse), case.answer(inputs), case, 1e-2)
