"""Cases of decode over random blocks, and over rows of shared keys, their inputs and answers in float64."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention.backends import reference
from dcpmla.attention.backends.calls import COUNTER_WORDS
from dcpmla.cache import formats
from dcpmla.cache.shared_format import rows_shape
from dcpmla.cache.shared_rows import write_rows
from tests.support.backends import unchecked_call

NOWHERE = 2**31 - 1  # a block that no cache has
KV_SCALE, Q_SCALE = 0.05, 0.03


@dataclass
class Case:
    """Requests as (query tokens, keys that the last token sees); each token before sees one less, or fewer where
    is_sharded.
    """

    requests: Sequence[tuple[int, int]]
    num_heads: int = 128
    block_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_lora_rank: int = 512
    rope: int = 64
    format: str = "auto"  # `DCPConfig.kv_cache_dtype` of the cache
    has_fp8_queries: bool = False
    is_sharded: bool = False
    max_query_len: int | None = None  # requests are cut into pieces of this length, which share a row of the table
    # The workspace has room for 64 rows each; None: one for each multiprocessor, on a CPU the kernel's own.
    num_programs: int | None = None

    def inputs(self, device: str, seed: int = 0) -> dict[str, Any]:
        """Of `mla_decode`: random blocks in a cache of bytes 0xFF, NaN in every format's every part, wherever no key
        is.
        """
        generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
        width = self.kv_lora_rank + self.rope
        counts = [-(-num_keys // self.block_size) for _, num_keys in self.requests]
        blocks = draw.sample(range(sum(counts) + 2), sum(counts))
        storage = formats.storage_dtype(self.format, self.dtype)
        kv_scale = torch.tensor([KV_SCALE]) if storage == formats.FP8 else None
        row_bytes = formats.row_width(storage, self.kv_lora_rank, self.rope) * storage.itemsize
        cache = torch.full((sum(counts) + 2, self.block_size, row_bytes), 0xFF, dtype=torch.uint8).view(storage)
        table = torch.full((len(counts), max([*counts, 1]) + 1), NOWHERE, dtype=torch.int32)
        seq_lens: list[int] = []
        for row, count, (num_queries, num_keys) in zip(table, counts, self.requests, strict=True):
            own = [blocks.pop() for _ in range(count)]
            row[:count] = torch.tensor(own, dtype=torch.int32)
            keys = torch.randn(num_keys, width, generator=generator)
            rows = formats.to_cache_rows(*keys.split([self.kv_lora_rank, self.rope], -1), storage, kv_scale)
            for index, block in enumerate(own):
                part = rows[index * self.block_size : (index + 1) * self.block_size]
                cache[block, : len(part)] = part
            steps = [draw.randint(0, 1) if self.is_sharded else 1 for _ in range(num_queries - 1)]
            seq_lens += [max(0, num_keys - sum(steps[token:])) for token in range(num_queries)]
        longest = self.max_query_len or max(num_queries for num_queries, _ in self.requests)
        pieces = [
            (index, min(longest, num_queries - first))
            for index, (num_queries, _) in enumerate(self.requests)
            for first in range(0, num_queries, longest)
        ]
        request_index, queries = (list(numbers) for numbers in zip(*pieces, strict=True))
        start = None if len(set(queries)) == 1 else torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
        q = torch.randn(len(seq_lens), self.num_heads, width, generator=generator)
        q_scale = torch.tensor([Q_SCALE]) if self.has_fp8_queries else None
        tensors = {
            "q": q.to(self.dtype) if q_scale is None else formats.to_fp8(q, q_scale),
            "kv_cache": cache,
            "block_table": table,
            "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
            "request_index": torch.tensor(request_index, dtype=torch.int32) if self.max_query_len else None,
            "query_start_loc": start,
            "workspace": self.new_workspace(device),
            "kv_scale": kv_scale,
            "q_scale": q_scale,
        }
        on_device = {name: tensor if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
        numbers = {"softmax_scale": width**-0.5, "kv_lora_rank": self.kv_lora_rank, "max_query_len": max(queries)}
        return {**on_device, **numbers, "dtype": self.dtype}

    def new_workspace(self, device: str) -> Tensor | None:
        num_programs = self.num_programs
        if device == "cuda" and num_programs is None:
            num_programs = torch.cuda.get_device_properties(device).multi_processor_count
        if num_programs is None:
            return None
        workspace = torch.full((COUNTER_WORDS + num_programs * 128 * 513,), torch.nan)
        workspace[:COUNTER_WORDS] = 0
        return workspace

    def answer(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Compute the reference in float64 on the same bytes.

        fp8_ds_mla's products with scales count as rounded to the model's dtype.
        """
        exact = {**inputs, "q": inputs["q"].double(), "dtype": torch.float64}
        if self.format == "fp8_ds_mla":
            exact["kv_cache"] = formats.to_latents(inputs["kv_cache"], self.kv_lora_rank, None, self.dtype)
        return reference.mla_decode(unchecked_call(**exact))


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


def check(
    kernel: Any, case: Case, device: str, tolerance: float = 1e-2, lse_tolerance: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """Check a kernel twice with one workspace, whose counters must be as they were; return its last result.

    On GPUs it gets two sets of inputs, else only the first.
    """
    for seed in range(2 if device == "cuda" else 1):
        inputs = case.inputs(device, seed)
        expected = case.answer(inputs)
        for _ in range(2 if inputs["workspace"] is not None else 1):
            got = kernel(**inputs)
            compare(got, expected, case, tolerance, lse_tolerance)
            assert inputs["workspace"] is None or not inputs["workspace"][:COUNTER_WORDS].any()
    return got


def compare(
    got: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    case: Case,
    tolerance: float,
    lse_tolerance: float = 1e-4,
) -> None:
    (out, lse), (exact, exact_lse) = got, expected
    assert (out.dtype, lse.dtype) == (case.dtype, torch.float32)
    is_empty = exact_lse == -torch.inf
    assert not out[is_empty].any(), case
    assert torch.equal(lse == -torch.inf, is_empty), case
    torch.testing.assert_close(lse[~is_empty].double(), exact_lse[~is_empty].double(), atol=lse_tolerance, rtol=1e-4)
    # Halves, because other warps write each.
    for rows, wrong in zip(exact.split(256, -1), (out.double() - exact).split(256, -1), strict=True):
        error = (wrong.norm(dim=-1) / rows.norm(dim=-1).clamp(min=1e-30)).max()
        assert error < tolerance, f"{case}: error {error:.1e} of a row"


# The interpreter multiplies bfloat16 as integers.
SMALL = {"kv_lora_rank": 32, "rope": 16, "block_size": 16, "dtype": torch.float16}


def long_case(num_reqs: int, num_keys: int, **fields: Any) -> Case:
    draw = random.Random(num_keys)
    return Case([(1, draw.randint(num_keys // 2, num_keys)) for _ in range(num_reqs)], **fields)


def ones(*lens: int) -> list[tuple[int, int]]:
    return [(1, length) for length in lens]


def ragged(num_tokens: int, longest: int) -> list[tuple[int, int]]:
    draw = random.Random(num_tokens + longest)
    return ones(*(draw.choice([0, 1, 63, 64, 65, draw.randint(0, longest), longest]) for _ in range(num_tokens)))


FP8_QUERIES: dict[str, Any] = {"format": "fp8", "has_fp8_queries": True}
QUANTIZED: list[dict[str, Any]] = [{"format": "fp8"}, FP8_QUERIES, {"format": "fp8_ds_mla"}]
SHARED_FORMATS = ["auto", "fp8_ds_mla"]
