"""A second plug-in, of the tests: DCP on CPUs, which SGLang keeps to accelerators, and a count of our calls."""

import os
import sys
from collections.abc import Callable
from typing import Any


def register() -> None:
    """Let SGLang shard over CPUs and cache latents in 8 bits there; write a line for each call of our attention; break
    the merge if asked to.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.mem_cache import allocation, kv_cache_configurator

    is_hip, platform = parallel_state.is_hip, kv_cache_configurator.current_platform
    parallel_state.is_hip = lambda: is_hip() or _caller() == "initialize_model_parallel"
    allocation._is_xpu = True  # pages as wide as the allocator's
    anywhere = type("Anywhere", (), {"__getattr__": lambda self, name: getattr(platform, name)})
    anywhere.is_cpu = lambda self: platform.is_cpu() and _caller() != "configure"
    kv_cache_configurator.current_platform = anywhere()
    watch()


def _caller() -> str:
    """Return the name of the function that called the one that asks."""
    return sys._getframe(2).f_code.co_name


def watch() -> None:
    """Have calls of our attention and exchange write their names to SGLANG_TEST_CALLS."""
    from dcpmla.comm.nccl import AllToAll
    from dcpmla.integrations.sglang import backend

    for name in ("dcp_mla_decode", "dcp_mla_prefill"):
        setattr(backend, name, counted(name, getattr(backend, name)))
    for name in ("gather_heads", "start_context", "combine"):
        setattr(AllToAll, name, counted(name, getattr(AllToAll, name)))
    if os.environ.get("SGLANG_TEST_BREAK"):
        AllToAll.combine = lambda self, out, lse: (out[:, : out.shape[1] // 2], lse)


def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that writes its name and calls another."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with open(os.environ["SGLANG_TEST_CALLS"], "a") as file:  # noqa: PTH123
            file.write(f"{name}\n")
        return function(*args, **kwargs)

    return call
