"""Layouts of a cache over ranks."""

from typing import Any

from dcpmla import DCPConfig


def dcp_config(tp: int, dcp: int, interleave: int = 1, **options: Any) -> DCPConfig:
    return DCPConfig(
        tensor_parallel_size=tp, decode_context_parallel_size=dcp, cp_kv_cache_interleave_size=interleave, **options
    )
