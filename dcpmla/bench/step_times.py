"""Device times of a model's steps without an engine around them: all of a step, and its layers of experts alone."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.attention.calls import decode_workspace
from dcpmla.attention.step import StepRequests
from dcpmla.bench.timing import time_operation
from dcpmla.cache.plan import Cache
from dcpmla.config import DCPConfig
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.parallel.linear import Linear
from dcpmla.parallel.mesh import DCPMesh

_CALLS = 4  # steps of one sample: the start of a graph counts a quarter each
_SECONDS = 1.0  # that the samples of one measurement may take


class StepTimes(NamedTuple):
    """Microseconds of a step, on the slowest rank.

    Attributes:
        device_us: from the tokens' embedding to their logits.
        us_per_moe_layer: what a layer of experts takes of it, attention included; 0 where the model has none, or other
            layers around them (LongCat's).
        num_kernels: that a step launches; 0 on CPUs.
    """

    device_us: float
    us_per_moe_layer: float
    num_kernels: int


def step_times(
    model: ShardedModel, cache: Cache, dcp: DCPConfig, mesh: DCPMesh, batch: int, context: int, query_len: int = 1
) -> StepTimes:
    """Time steps of `batch` requests with `context` tokens, the last query_len of which a step computes. Collective
    over the job. The cache's contents do not matter.
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
        return model.step(token_ids, metadata, cache, last_rows)

    with torch.inference_mode():
        calls = _CALLS if query_len == 1 else 1
        device_us = time_operation(step, device, calls, _SECONDS).median_us
        hidden = torch.randn(len(token_ids), model.head.linear.in_features, dtype=model.dtype, device=device)
        decoder, prepared = model.hidden_states, model.prepare(metadata)
        blocks, of_blocks = decoder.moe_blocks(), 0.0
        if blocks:
            run = partial(decoder.run, blocks, hidden, token_ids, prepared, cache)
            of_blocks = time_operation(lambda _: run(), device, calls, _SECONDS).median_us / len(blocks)
        return StepTimes(device_us, of_blocks, _num_kernels(step, device))


def _num_kernels(step: Callable[[], Tensor], device: torch.device) -> int:
    """Count the kernels that a step launches."""
    if device.type != "cuda":
        return 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profile.events())


def is_quantized(model: ShardedModel) -> bool:
    """Tell whether linear layers keep codes in 8 bits."""
    linears = (module for module in model.hidden_states.modules() if isinstance(module, Linear))
    return any(linear.weight_scale is not None for linear in linears)
