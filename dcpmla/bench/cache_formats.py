"""Cache formats as benchmarks measure them: their options and names, and caches full of random latents.

"bf16" stands for plain rows, whose dtype is the run's: bfloat16 on GPUs, float32 on CPUs.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from dcpmla.cache import formats
from dcpmla.cache.capacity import FORMATS
from dcpmla.cli.values import name_list
from dcpmla.config import DECODE_QUERY_DTYPES

# Of random values: normal ones, and single ones of up to 448 times these. They differ, so that a kernel that mixes them
# up is seen.
KV_SCALE, Q_SCALE = 0.04, 0.02
_CHUNK = 1 << 15  # rows encoded at a time: what is wide between them and the cache stays below 1 GB


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """The formats to measure, plain rows first: others are set against them."""

    def caches(text: str) -> list[str]:
        return sorted(name_list(text, FORMATS, "a cache format"), key=FORMATS.index)

    def queries(text: str) -> list[str]:
        return name_list(text, DECODE_QUERY_DTYPES, "a dtype of queries")

    names = f"of {', '.join(FORMATS)}; bf16 stands for rows that are not quantized"
    parser.add_argument("--kv-cache-dtype", type=caches, default="bf16", metavar="NAME,...", help=names)
    dtypes = f"of queries over an fp8 cache: of {', '.join(DECODE_QUERY_DTYPES)}"
    parser.add_argument(
        "--decode-query-dtype", type=queries, default=",".join(DECODE_QUERY_DTYPES), metavar="NAME,...", help=dtypes
    )


def config_name(cache_format: str) -> str:
    """`DCPConfig.kv_cache_dtype` of a format."""
    return "auto" if cache_format == "bf16" else cache_format


def storage_dtype(cache_format: str, dtype: torch.dtype) -> torch.dtype:
    """Of a cache tensor, where plain rows are in `dtype`."""
    return formats.storage_dtype(config_name(cache_format), dtype)


def query_dtypes(cache_format: str, asked: Sequence[str]) -> Sequence[str]:
    """Of the queries' dtypes ("auto", "fp8"), those over a format: e4m3 goes with fp8 alone."""
    return asked if cache_format == "fp8" else ("auto",)


def quantized_name(cache_format: str, query_dtype: str) -> str:
    """For people; empty where nothing is quantized."""
    return "" if cache_format == "bf16" else f"{cache_format} cache" + (" and queries" if query_dtype == "fp8" else "")


def scale_tensor(scale: float, device: torch.device) -> Tensor:
    return torch.tensor([scale], dtype=torch.float32, device=device)


def kv_scale_of(storage: torch.dtype, device: torch.device) -> Tensor | None:
    """KV_SCALE for a cache that has a scale."""
    return scale_tensor(KV_SCALE, device) if storage == formats.FP8 else None


def fill_randomly(kv_cache: Tensor, kv_lora_rank: int, dtype: torch.dtype) -> None:
    """Normal latents of `dtype`, in the cache's format and with KV_SCALE; kv_cache [..., row_width] is contiguous."""
    if kv_cache.dtype == dtype:
        kv_cache.normal_()
        return
    latent_dim = kv_lora_rank + formats.rope_dim_of(kv_cache.shape[-1], kv_cache.dtype, kv_lora_rank)
    kv_scale = kv_scale_of(kv_cache.dtype, kv_cache.device)
    for rows in kv_cache.flatten(0, -2).split(_CHUNK):
        latents = torch.randn(len(rows), latent_dim, dtype=dtype, device=rows.device)
        rows.copy_(formats.quantize(latents[:, :kv_lora_rank], latents[:, kv_lora_rank:], rows.dtype, kv_scale))
