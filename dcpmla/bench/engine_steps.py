"""Times of an engine's steps: with decodes alone, and with a piece of a prompt as well."""

import math
import time
from array import array
from dataclasses import replace

import torch

from dcpmla.bench.load import add_load, make_load
from dcpmla.bench.results import Row
from dcpmla.bench.timing import largest, profile_kernels, time_calls
from dcpmla.runtime.batch import Batch
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import Request
from dcpmla.runtime.runner import StepRunner
from dcpmla.runtime.sampling import SamplingParams

_NUM_SAMPLES = 5
_STEPS = {"cuda": 8, "cpu": 1}  # steps of a sample, launched one after the other


def decode_steps(engine: Engine, batch: int, input_len: int, output_len: int, seed: int) -> list[tuple[float, int]]:
    """Return the seconds of each decode step of a whole batch, until its tokens are on the host, and the number of its
    tokens.
    """
    vocab_size = engine.model.vocab_size
    add_load(engine, make_load(batch, math.inf, [input_len], [output_len], vocab_size, seed))
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
    batch = _batch(engine, num_tokens, num_decodes, context)
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


def _batch(engine: Engine, num_tokens: int, num_decodes: int, context: int) -> Batch:
    """Return decodes after a context, then the first tokens of a prompt; their blocks may be shared."""
    batch, sizes = Batch(num_tokens), engine.cache.sizes

    def add(index: int, num_cached: int, num_new: int, has_forms: bool = False) -> None:
        request = Request(
            [1 + index % 2] * (num_cached + num_new), SamplingParams(ignore_eos=True), has_forms=has_forms
        )
        blocks = -(-(num_cached + num_new) // sizes.block_tokens)
        request.block_ids = array("q", ((index * blocks + block) % sizes.num_blocks for block in range(blocks)))
        request.num_computed_tokens, request.state = num_cached, index if sizes.num_states else None
        batch.add(request, num_new)

    for index in range(num_decodes):
        add(index, context, 1)
    add(num_decodes, 0, num_tokens - num_decodes, engine.has_forms)
    return batch
