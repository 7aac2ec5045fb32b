"""vLLM's engine over layers with random weights: its steps, timed, and the attention in them (`in_vllm.py`)."""

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.vllm_layers import Modules, Parts
from benchmarks.vllm_models import OURS, PREFILLS, VOCAB_SIZE, Model, Variant
from dcpmla.bench.timing import Timing, largest, time_graph

NUM_PREFILLS = 5  # Repetitions; the median counts.
NUM_STEPS, NUM_DECODED = 8, 128  # NUM_DECODED: more than one engine's steps before requests are aborted


def measure(engine: Any, recorder: "Recorder", model: Model, variant: Variant) -> list[dict[str, Any]]:
    """Return an engine's rows, one for each load and each kind of layers. Collective over the job."""
    from benchmarks.vllm_contexts import Contexts

    parallel, contexts = engine.vllm_config.parallel_config, Contexts(engine)
    layers: Any = (Parts if model.in_parts else Modules)(engine, recorder)
    device, is_ours = layers.device, variant.backend == OURS
    shared = {
        "geometry": model.name,
        "kernel": "dcpmla" if is_ours else variant.backend,
        "exchange": layers.exchange if is_ours else variant.exchange or "none",
        "tp": parallel.tensor_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
        "num_layers": model.num_layers,
        "heads": engine.vllm_config.model_config.hf_config.num_attention_heads,
        "block_size": model.block_size,
        "dtype": "bfloat16",
        "kv_cache_dtype": variant.kv_cache_dtype,
        **({} if model.in_parts else {"part": "total"}),
    }
    rows = []
    for batch, context in model.loads:
        contexts.fill()
        names = decode(engine, batch, context)
        step_us = time_graph(recorder.graph, device)  # first: timing records graphs of its own
        for fields, timing in layers.decode(batch):
            row = row_of("decode", timing, batch, context) | {"device_us": step_us}
            rows.append(shared | fields | row)
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
    for num_new, context in PREFILLS:
        contexts.num_new = num_new
        contexts.fill()
        step_us = time_prefill_step(engine, num_new + context, device)
        for fields, timing in layers.prefill(num_new):
            rows.append(shared | fields | prefill_row(timing, num_new, context, step_us))
    if dist.get_rank() == 0:
        print(*rows, sep="\n", file=sys.stderr, flush=True)
    return rows


def row_of(operation: str, timing: Timing, batch: int, context: int) -> dict[str, Any]:
    """Return what rows of both operations have of their own."""
    times = {"median_us": timing.median_us, "in_graph": timing.in_graph}
    return {"operation": operation, "batch": batch, "context": context, **times}


def prefill_row(timing: Timing, num_new: int, context: int, step_us: float) -> dict[str, Any]:
    """Return the fields of a prefill's row."""
    return row_of("prefill", timing, 1, context) | {"step_us": step_us, "tokens": num_new}


@dataclass
class Step:
    """A step as vLLM prepared it: metadata and slots of all layers, by their names."""

    num_reqs: int
    num_tokens: int
    positions: torch.Tensor
    metadata: dict[str, Any]
    slots: dict[str, torch.Tensor]


class Recorder:
    """What vLLM used last: the graph that it replayed, the metadata of dense attention, and the step of all layers."""

    graph: torch.cuda.CUDAGraph
    metadata: Any
    step: Step

    def __init__(self) -> None:
        from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

        replay, build = torch.cuda.CUDAGraph.replay, MLACommonMetadataBuilder.build

        def recorded_replay(graph: torch.cuda.CUDAGraph) -> None:
            self.graph = graph
            replay(graph)

        def recorded_build(builder: Any, *args: Any, **named: Any) -> Any:
            self.metadata = build(builder, *args, **named)
            return self.metadata

        torch.cuda.CUDAGraph.replay = recorded_replay
        MLACommonMetadataBuilder.build = recorded_build

    def watch(self, runner: Any) -> None:
        """Record the steps that a model runner prepares from now on."""
        from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

        prepare = runner.model_state.prepare_attn

        def recorded_prepare(batch: Any, mode: Any, tables: Any, slots: Any, *args: Any, **named: Any) -> Any:
            metadata = prepare(batch, mode, tables, slots, *args, **named)
            by_layer = build_slot_mappings_by_layer(slots, runner.kv_cache_config)
            self.step = Step(batch.num_reqs, batch.num_tokens, batch.positions, metadata, by_layer)
            return metadata

        runner.model_state.prepare_attn = recorded_prepare


def start_engine(model: Model, variant: Variant, num_ranks: int) -> Any:
    """Return vLLM's engine over layers with random weights, and graphs of the loads' batches."""
    from vllm import LLM

    with tempfile.TemporaryDirectory() as directory:
        model.save_config(directory)
        return LLM(**model.engine_arguments(variant, num_ranks, directory)).llm_engine


def decode(engine: Any, batch: int, context: int) -> list[str]:
    """Have the engine decode some tokens of so many requests at once; return their names."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=NUM_DECODED, temperature=0, detokenize=False, ignore_eos=True)
    names = [f"{batch} {index}" for index in range(batch)]
    for name in names:
        engine.add_request(name, prompt_of(context), params)
    for _ in range(NUM_STEPS):
        engine.step()
    torch.cuda.synchronize()
    return names


def prompt_of(num_tokens: int) -> dict[str, list[int]]:
    """Return a prompt of so many tokens, as vLLM takes it."""
    return {"prompt_token_ids": [index % VOCAB_SIZE for index in range(num_tokens)]}


def time_prefill_step(engine: Any, num_tokens: int, device: torch.device) -> float:
    """Return the microseconds from a request to its first token: the median, the slowest rank's. Collective."""
    from vllm import SamplingParams

    params, times = SamplingParams(max_tokens=1, temperature=0, detokenize=False), []
    for index in range(NUM_PREFILLS):
        engine.add_request(f"{num_tokens} {index}", prompt_of(num_tokens), params)
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return largest(statistics.median(times), device)
