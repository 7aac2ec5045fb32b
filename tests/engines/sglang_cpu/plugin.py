"""A second plug-in, of the tests: DCP on CPUs, which SGLang keeps to accelerators, and a count of our calls."""

import os
import sys
from collections.abc import Callable
from typing import Any

from tests.engines.sglang_cpu import drafts


def register() -> None:
    """Let SGLang shard over CPUs and cache latents in 8 bits there; write a line for each call of our attention."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.mem_cache import allocation, kv_cache_configurator

    is_hip, platform = parallel_state.is_hip, kv_cache_configurator.current_platform
    parallel_state.is_hip = lambda: is_hip() or _caller() == "initialize_model_parallel"
    allocation._is_xpu = True  # pages as wide as the allocator's
    anywhere = type("Anywhere", (), {"__getattr__": lambda self, name: getattr(platform, name)})
    anywhere.is_cpu = lambda self: platform.is_cpu() and _caller() != "configure"
    kv_cache_configurator.current_platform = anywhere()
    drafts.patch()
    watch()
    if os.environ.get("SGLANG_TEST_DRAFTS"):
        drafts.record()
    if os.environ.get("SGLANG_TEST_FAULT"):
        fail_once()


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


def fail_once() -> None:
    """Have an exchange of the last rank fail in a decode step as in a CUDA graph: a kernel writes the fault word, and
    nothing is called. SGLANG_TEST_FAULT is the number of the step, and the word.
    """
    import torch
    import torch.distributed as dist

    from dcpmla.comm.nccl import AllToAll
    from dcpmla.integrations.sglang.metadata import MetadataBuilder

    faulty_step, word = map(int, os.environ["SGLANG_TEST_FAULT"].split())
    fault, steps = torch.zeros(1, dtype=torch.int64), []
    combine, decodes = AllToAll.combine, MetadataBuilder.decodes

    def counted_decodes(self: Any, batch: Any, *numbers: int) -> Any:
        steps.append(batch)
        return decodes(self, batch, *numbers)

    def failing_combine(self: Any, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if len(steps) == faulty_step and dist.get_rank() == dist.get_world_size() - 1:
            fault.fill_(word)
        return combine(self, out, lse)

    AllToAll.fault, AllToAll.combine, MetadataBuilder.decodes = fault, failing_combine, counted_decodes


def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that writes its name and calls another."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with open(os.environ["SGLANG_TEST_CALLS"], "a") as file:  # noqa: PTH123
            file.write(f"{name}\n")
        return function(*args, **kwargs)

    return call
