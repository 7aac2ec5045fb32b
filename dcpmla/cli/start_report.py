"""Lines that describe an engine after its start: layout, cache, and each choice with its reason (`start_lines`)."""

from collections.abc import Iterator
from typing import Any

from dcpmla.attention.backends.choice import DECODE_BACKENDS, PREFILL_BACKENDS, passed_over, select_backend
from dcpmla.bench.results import dtype_name
from dcpmla.cli.self_tests import decode_call, prefill_calls
from dcpmla.comm.select import ChosenExchange
from dcpmla.config import MLAConfig
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.open_model import ModelFiles
from dcpmla.job.join import Job
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.graph import StepGraph


def start_lines(
    job: Job, files: ModelFiles, engine: Engine, chosen: ChosenExchange, options: EngineOptions, knows_lengths: bool
) -> list[str]:
    """Return the lines.

    Args:
        knows_lengths: Whether the cache was sized for sequences of known lengths.
    """
    dcp, scheduler = engine.dcp, engine.scheduler
    commit = "" if files.commit is None else f", commit {files.commit}"
    sizes = dcp.tensor_parallel_size, dcp.decode_context_parallel_size
    lines = [
        f"model: {files.directory} ({files.config.model_type}{commit}) in {dtype_name(engine.model.dtype)}",
        f"ranks: {job.ranks.origin}",
        "layout: tp {}, dcp {}, interleave {}, block size {}".format(
            *sizes, dcp.cp_kv_cache_interleave_size, dcp.block_size
        )
        + (", whole experts on each rank" if options.enable_expert_parallel else ""),
        f"cache: {engine.cache.sizes}",
        f"room: {_room(engine, options, knows_lengths)}",
        f"exchange: {chosen.exchange.name} ({chosen.reason})",
        *_attention_lines(engine),
        *graph_lines(engine.graph, engine.mixed_graph),
    ]
    if engine.graph is None and engine.mixed_graph is None:
        lines.append(f"CUDA graphs: none ({_no_graphs(engine, options)})")
    lines.append(
        f"steps: up to {scheduler.max_num_batched_tokens:,} tokens of {scheduler.max_num_seqs:,} requests; "
        f"prefixes {'are' if options.enable_prefix_caching else 'are not'} reused"
    )
    if options.speculative_method != "none":
        lines.append(f"drafts: {options.speculative_method}, up to {options.num_speculative_tokens} of a request")
    return [*lines, *_tier_lines(engine, options)]


def graph_lines(graph: StepGraph | None, mixed_graph: StepGraph | None) -> list[str]:
    """Return the lines about an engine's CUDA graphs: how many there are, and the largest."""
    lines = []
    if graph is not None:
        sizes, wide = (
            [size.num_tokens // size.query_len for size in graph.sizes if (size.query_len > 1) == is_wide]
            for is_wide in (False, True)
        )
        of_drafts = f"; with drafts {len(wide)}, the largest of {wide[-1]}" if wide else ""
        lines.append(f"decode graphs: {len(sizes)}, the largest of {sizes[-1]} requests{of_drafts}")
    if mixed_graph is not None:
        num_whole, largest = sum(size.is_whole for size in mixed_graph.sizes), mixed_graph.sizes[-1].num_tokens
        of_whole = f"; of one graph each {num_whole}, the largest of {mixed_graph.max_whole_tokens}"
        counts = f"{len(mixed_graph.sizes) - num_whole}, the largest of {largest} tokens"
        lines.append(f"graphs of steps with prompts: {counts}{of_whole if num_whole else ''}")
    return lines


def _room(engine: Engine, options: EngineOptions, knows_lengths: bool) -> str:
    """Return how many of the longest requests fit, and the reason of the cache's size."""
    if knows_lengths and options.kv_cache_memory_bytes is None:
        return "what the prompts and their answers need, within --gpu-memory-utilization"
    sizes, longest = engine.cache.sizes, engine.max_model_len
    num_fitting = min(engine.scheduler.max_num_seqs, sizes.num_blocks // -(-longest // sizes.block_tokens))
    if options.kv_cache_memory_bytes is not None:
        reason = f"--kv-cache-memory-bytes {options.kv_cache_memory_bytes:,}"
    elif engine.model.device.type == "cpu":
        reason = "what --max-num-seqs requests of --max-model-len need, within --gpu-memory-utilization"
    else:
        reason = f"the memory that --gpu-memory-utilization {options.gpu_memory_utilization:g} leaves"
    words = f"{num_fitting:,} requests of the longest, {longest:,} tokens, fit at once"
    if not num_fitting:
        words = f"no request of the longest, {longest:,} tokens, fits: {sizes.num_blocks * sizes.block_tokens:,} do"
    return f"{words}; the cache's size is {reason}"


def _attention_lines(engine: Engine) -> Iterator[str]:
    """Yield the kernels of dense calls with the model's widths, as `doctor` finds them, and the reasons against others;
    nothing for a model whose layers all have kernels of their own.
    """
    config, device, dtype = engine.model.attention.config, engine.model.device, engine.model.dtype
    if not isinstance(config, MLAConfig):
        return
    decode = decode_call(config, device, dtype)
    rows = next((layer.latents for layer in engine.cache if layer.latents.shape[-1]), decode.kv_cache)
    phases: tuple[tuple[str, str, list[Any], Any], ...] = (
        ("decode", engine.dcp.attention_backend, DECODE_BACKENDS, decode._replace(kv_cache=rows)),
        ("prefill", engine.dcp.prefill_backend, PREFILL_BACKENDS, prefill_calls(config, device, dtype)["causal"]),
    )
    for phase, name, table, call in phases:
        if name != "auto":
            yield f"attention, {phase}: {name}, as asked for"
            continue
        against = passed_over(table, call) if device.type == "cuda" else {}
        words = "".join(f"; not {other}: {obstacle}" for other, obstacle in against.items())
        yield f"attention, {phase}: {select_backend(table, call).name}, the first that takes its calls{words}"


def _no_graphs(engine: Engine, options: EngineOptions) -> str:
    if engine.model.device.type == "cpu":
        return "CPUs have none"
    return "--enforce-eager" if options.enforce_eager else "they cannot be captured, as the lines above say"


def _tier_lines(engine: Engine, options: EngineOptions) -> Iterator[str]:
    """Yield the sizes of the memories below the cache, and what a disk holds of earlier jobs."""
    tier, block_tokens = engine.scheduler.tier, engine.cache.sizes.block_tokens
    if engine.dcp.kv_hot_tokens is not None:
        num_tokens, num_bytes = engine.cache.sizes.tokens_total, engine.cache.sizes.host_bytes_per_block
        yield (
            f"host memory: latents of all {num_tokens:,} tokens, {num_bytes * engine.cache.sizes.num_blocks:,} bytes a "
            f"rank of --kv-offloading-size {options.kv_offloading_size:g} GiB for all; on the GPUs index keys, and "
            f"latents of {engine.dcp.kv_hot_tokens:,} tokens a layer (--kv-hot-tokens)"
        )
    elif options.kv_offloading_size is not None:
        num_blocks = tier.blocks.num_slots
        yield (
            f"host memory: {options.kv_offloading_size:g} GiB (--kv-offloading-size) for {num_blocks:,} blocks, "
            f"{num_blocks * block_tokens:,} tokens"
        )
    if options.kv_offloading_path is not None:
        num_blocks, num_found = tier.disk.blocks.num_slots, len(tier.disk.blocks)
        yield (
            f"disk: {options.kv_offloading_disk_size:g} GiB in {options.kv_offloading_path} for {num_blocks:,} blocks, "
            f"{num_blocks * block_tokens:,} tokens; found {num_found:,} blocks of earlier jobs"
        )
