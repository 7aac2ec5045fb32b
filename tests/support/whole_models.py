"""Whole models on a rank, as `load_model` loads them: over caches that hold NaN, answers with their logits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.loading import load_engine
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.open_model import ModelFiles, open_model
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.integrations.transformers import load_model
from dcpmla.parallel.mesh import DCPMesh, init_mesh
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from tests.support.engines import new_engine
from tests.support.models import VOCAB_SIZE
from tests.support.oracle import Answer

Answers = list[Answer]


def draw_prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    """Return random prompts of some lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB_SIZE - 1, (length,), generator=generator).tolist() for length in lengths]


def device_of(device_type: str) -> torch.device:
    """Return this rank's device."""
    return torch.device(device_type, dist.get_rank()) if device_type == "cuda" else torch.device("cpu")


def load_on_rank(
    directory: Path,
    dcp: DCPConfig,
    device_type: str = "cpu",
    dtype: torch.dtype | None = torch.float32,
    *args: Any,
    **options: Any,
) -> tuple[ShardedModel, DCPMesh]:
    """Load a rank's part of a model, with options of `load_model`, and return it with the ranks' groups."""
    mesh = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
    device, config = device_of(device_type), load_config(directory)
    exchange = select_exchange(dcp, mesh.dcp_group, device)
    return load_model(directory, config, dcp, mesh, exchange, dtype, device, *args, **options), mesh


def load_engine_on_rank(
    model: Path | ModelFiles,
    dcp: DCPConfig,
    options: EngineOptions | None = None,
    max_model_len: int | None = None,
    device_type: str = "cpu",
    seq_lens: Sequence[int] | None = None,
) -> Engine:
    """Load an engine as its user gets it."""
    mesh = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
    device = device_of(device_type)
    files = open_model(str(model), max_model_len) if isinstance(model, Path) else model
    exchange = select_exchange(dcp, mesh.dcp_group, device)
    return load_engine(files, dcp, mesh, exchange, device, options, seq_lens=seq_lens)


def poisoned_cache(model: ShardedModel, dcp: DCPConfig, seq_lens: Sequence[int], *numbers: int) -> Any:
    """Return a cache of values that no step may read before they are written.

    Args:
        numbers: More arguments of `plan_cache`: numbers of states and of drafts.
    """
    cache = model.attention.plan_cache(dcp, seq_lens, model.dtype, *numbers).allocate(model.device)
    for memory in cache.tensors:
        if memory.dtype in (torch.int32, torch.int64):
            memory.fill_(10**6)
        else:
            memory.view(torch.uint8).fill_(0xFF)  # NaN in every format
    return cache


def serve(engine: Engine, prompts: Sequence[Sequence[int]], num_new: int, **params: Any) -> list[Request]:
    """Serve prompts at the same time, and return their requests."""
    sampling = SamplingParams(max_new_tokens=num_new, **params)
    requests = [engine.add(list(prompt), sampling, keep_logits=True) for prompt in prompts]
    assert len(list(engine.run())) == len(requests)
    return requests


def answers_of(requests: Sequence[Request]) -> Answers:
    """Return the answers of requests that keep logits."""
    return [(request.token_ids, torch.stack(request.logits)) for request in requests]


def serve_layouts(
    directory: Path, layouts: Sequence[DCPConfig], prompts: Sequence[Sequence[int]], num_times: int = 1
) -> list[Answers]:
    """On one rank: return the answers to prompts by an engine of each layout, the last time that they are served.

    Served again they are found in the cache, and get the same answers; in 8 bits a cached prefix is rounded, and new
    tokens are not.
    """
    results = []
    for dcp in layouts:
        model, mesh = load_on_rank(directory, dcp)
        engine = new_engine(model, poisoned_cache(model, dcp, [80] * 6, 12), dcp, mesh, 80, 33, max_num_seqs=4)
        requests = serve(engine, prompts, 4, ignore_eos=True)
        for _ in range(1, num_times):
            first, requests = requests, serve(engine, prompts, 4, ignore_eos=True)
            assert max(request.num_cached_tokens for request in requests) >= 32
            if dcp.kv_cache_dtype == "auto":
                torch.testing.assert_close(answers_of(requests), answers_of(first), atol=1e-4, rtol=1e-4)
        results.append(answers_of(requests))
    return results
