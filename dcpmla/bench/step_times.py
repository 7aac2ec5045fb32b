"""Device times of a model's steps without an engine around them: all of a step, its layers of experts alone, and the
least time of a step.
"""

import argparse
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from dcpmla.attention.backends.calls import decode_workspace
from dcpmla.attention.step.table import StepRequests
from dcpmla.bench.ceilings import floor_fields
from dcpmla.bench.results import Row
from dcpmla.bench.timing import is_h200, profile_kernels, time_operation
from dcpmla.cache.formats import format_name
from dcpmla.cache.layers import Cache
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

_CALLS = 4  # steps of one sample: the start of a graph counts a quarter each
_SECONDS = 1.0  # limit for the samples of one measurement


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
    num_blocks = -(-context // sizes.block_tokens)
    tables = [list(range(index * num_blocks, (index + 1) * num_blocks)) for index in range(batch)]
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
