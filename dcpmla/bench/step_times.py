"""Times of steps: an engine's, with decodes alone and with a piece of a prompt as well; and without an engine around
them, on the device: all of a step, its layers of experts alone, and the least time of a step.
"""

import argparse
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dcpmla.attention.backends.calls import decode_workspace
from dcpmla.attention.step.table import StepRequests
from dcpmla.bench.ceilings import floor_fields
from dcpmla.bench.results import Row
from dcpmla.bench.timing import is_h200, largest, profile_kernels, time_calls, time_operation
from dcpmla.cache.formats import format_name
from dcpmla.cache.layers import Cache
from dcpmla.cache.plan import CachePlan
from dcpmla.config import DCPConfig
from dcpmla.integrations.model_size import read_model
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.model.moe import MoE
from dcpmla.parallel.linear import Linear
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.planning.capacity import FORMATS
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.machine import H200X8
from dcpmla.planning.setting import Setting
from dcpmla.planning.weights import ModelSize
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.made_steps import Made, made_batch
from dcpmla.runtime.runner import StepRunner
from dcpmla.runtime.sampling import SamplingParams

_CALLS = 4  # steps of one sample: the start of a graph counts a quarter each
_SECONDS = 1.0  # limit for the samples of one measurement
_NUM_SAMPLES = 5  # of an engine's steps with a piece of a prompt
_STEPS = {"cuda": 8, "cpu": 1}  # steps of a sample, launched one after the other


# ---- steps of an engine


def decode_steps(engine: Engine, batch: int, input_len: int, output_len: int, seed: int) -> list[tuple[float, int]]:
    """Return the seconds of each decode step of a whole batch, until its tokens are on the host, and the number of its
    tokens.
    """
    prompts = np.random.default_rng(seed).integers(engine.model.vocab_size, size=(batch, input_len))
    for index, prompt in enumerate(prompts.tolist()):
        params = SamplingParams(max_new_tokens=output_len, ignore_eos=True)
        engine.add(prompt, params, request_id=index, arrival_time=0.0)
    engine.restart_clock()
    steps, drafter = [], engine.speculation.drafter
    num_drafts = drafter.num_speculative_tokens if drafter.drafts_always else 0
    while engine.has_requests:
        before, started = replace(engine.stats), time.perf_counter()
        num_running = len(engine.scheduler.running)
        engine.step()
        num_tokens = engine.stats.num_decode_tokens - before.num_decode_tokens
        has_all = engine.stats.num_draft_tokens - before.num_draft_tokens >= batch * num_drafts
        if num_tokens >= batch == num_running and has_all:  # near their ends requests try fewer drafts
            steps.append((time.perf_counter() - started, num_tokens))
    if not steps:
        reason = f"with a batch of {batch} the first requests end before the last prompts are computed"
        raise ValueError(f"--output-len is {output_len}: {reason}; raise it, or --max-num-batched-tokens")
    return steps


def mixed_times(engine: Engine, num_tokens: int, num_decodes: int, context: int, in_graphs: bool) -> Row:
    """Time steps of a prompt's first tokens and of decodes. Collective over the job. The cache's content is arbitrary.

    Args:
        num_tokens: Number of tokens of a step, more than num_decodes.
        context: Number of cached tokens of each decode.
        in_graphs: Whether the engine's graphs run the steps.
    Returns:
        Fields of a row, on the slowest rank: `step_us`, the time from one step to the next while the host launches
        steps ahead of the GPU; on GPUs also `device_us`, the time of the kernels.
    """
    costs, device = engine.scheduler.costs, engine.model.device
    runner = StepRunner(engine.model, engine.cache, engine.dcp, engine.mesh.dcp_rank, costs, engine.grammars)
    mixed = engine.mixed_graph if in_graphs else None
    batch = made_batch(engine, [Made(context, 1)] * num_decodes + [Made(0, num_tokens - num_decodes)])
    batch.arrange(costs, 0 if mixed is None else mixed.max_whole_tokens)
    graph = runner.graph_of(batch, None, mixed)

    def step(_: int = 0) -> None:
        runner.start(batch, None, None, graph, 0.0)

    with torch.inference_mode():
        step_us = time_calls(step, device, _STEPS[device.type], _NUM_SAMPLES)
        if device.type != "cuda":
            return {"step_us": round(step_us, 1)}
        device_us = sum(event.self_device_time_total for event in profile_kernels(step).key_averages())
        return {"step_us": round(step_us, 1), "device_us": round(largest(device_us, device), 1)}


# ---- steps on the device alone


def step_times(
    model: ShardedModel, cache: Cache, dcp: DCPConfig, mesh: DCPMesh, batch: int, context: int, query_len: int = 1
) -> Row:
    """Time steps of `batch` requests with `context` tokens; a step computes the last query_len. Collective
    over the job. The cache's contents do not matter.

    Returns:
        Fields of a row, on the slowest rank: `device_us`, from the tokens' embedding to their logits;
        `us_per_moe_layer`, of a layer of experts, attention included, 0 where the model has none, or other layers
        around them (LongCat's); `num_kernels`, which a step launches, 0 on CPUs.
    """
    device, sizes = model.device, cache.sizes
    tables = block_tables(sizes, batch, context)
    requests = StepRequests([query_len] * batch, [context] * batch, tables, list(range(batch)))
    steps = model.attention.step_builder(sizes, dcp, mesh.dcp_rank, device)
    metadata = steps.build(requests, workspace=decode_workspace(device))
    token_ids = torch.arange(batch * query_len, device=device) % model.vocab_size
    last_rows = torch.arange(query_len - 1, batch * query_len, query_len, device=device)

    def step(_: int = 0) -> Tensor:
        return model.logits(model.hidden(token_ids, metadata, cache)[last_rows])

    with torch.inference_mode():
        prepared = model.prepare(metadata)
        calls = _CALLS if query_len == 1 else 1
        device_us = time_operation(step, device, calls, _SECONDS).median_us
        of_blocks = _moe_layer_us(model, lambda: model.hidden_states(token_ids, prepared, cache), calls)
        events = profile_kernels(step).events() if device.type == "cuda" else []
        num_kernels = sum(event.device_type.name == "CUDA" for event in events)
        return {"device_us": round(device_us, 1), "us_per_moe_layer": round(of_blocks, 1), "num_kernels": num_kernels}


def block_tables(sizes: CachePlan, batch: int, context: int) -> list[list[int]]:
    """Return the blocks of each of `batch` requests with `context` tokens: the first ones of a cache, in order."""
    num_blocks = -(-context // sizes.block_tokens)
    return [list(range(index * num_blocks, (index + 1) * num_blocks)) for index in range(batch)]


def _moe_layer_us(model: ShardedModel, run: Callable[[], Tensor], calls: int) -> float:
    """Return the time of a block of attention and experts in a decoder that has these alone; 0 where it has none."""
    decoder = model.hidden_states
    every, blocks = decoder.blocks, [each for each in decoder.blocks if isinstance(getattr(each, "mlp", None), MoE)]
    if not blocks:
        return 0.0
    decoder.blocks = nn.ModuleList(blocks)
    try:
        return time_operation(lambda _: run(), model.device, calls, _SECONDS).median_us / len(blocks)
    finally:
        decoder.blocks = every


def is_quantized(model: ShardedModel) -> bool:
    """Return whether linear layers keep codes in 8 bits."""
    linears = (module for module in model.hidden_states.modules() if isinstance(module, Linear))
    return any(linear.weight_scale is not None for linear in linears)


def size_of(config: Any, dtype: torch.dtype, expert_dtype: str) -> ModelSize:
    """Return the planner's size of a model that computes in a dtype."""
    config = copy(config)
    config.dtype = dtype
    return read_model(config).with_expert_dtype(expert_dtype)


def modelled_times(
    args: argparse.Namespace, engine: Engine, size: ModelSize, exchange: str, batch: int, context: int, device_us: float
) -> Row:
    """Return fields of a row on a step after `context` cached tokens: the least time at the memory's rate, as a share
    of the measured `device_us` too, and the planner's prediction. There are none on other devices than H200s, nor for
    caches that the planner has no numbers for.
    """
    mesh, kv_cache_dtype = engine.mesh, format_name(engine.cache.sizes.dtype)
    if not is_h200(engine.model.device) or kv_cache_dtype not in FORMATS:
        return {}
    options = {name: getattr(args, name) for name in ("index_cache_dtype", "enable_expert_parallel")}
    setting = Setting(tp=mesh.tp_size, dcp=mesh.dcp_size, kv_cache_dtype=kv_cache_dtype, **options)
    deployment = Deployment(H200X8, size, setting, exchange)
    predicted_us = round(deployment.step_us(batch, context)["total"], 1)
    return {**floor_fields(deployment.floor_us(batch, context), device_us), "predicted_us": predicted_us}
