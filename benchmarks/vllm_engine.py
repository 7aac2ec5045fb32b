"""vLLM's engine over layers with random weights: its steps, and the attention of its layers, timed (`in_vllm.py`)."""

import statistics
import sys
import tempfile
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dcpmla.bench.geometries import config_of
from dcpmla.bench.timing import Timing, largest, time_graph, time_operation

LOADS = [(1, 65536), (8, 65536), (32, 8192), (128, 8192)]  # requests, cached tokens of each
# New tokens of one request, and its cached ones.
SHORT_PREFILLS = [(num_new, context) for context in (3584, 65536) for num_new in (1, 8, 64, 512)]
PREFILLS = [*SHORT_PREFILLS, (1024, 3072), (8192, 0), (2048, 63488), (8192, 57344)]
NUM_PREFILLS = 5  # Repetitions; the median counts.
NUM_LAYERS, NUM_STEPS, BLOCK_SIZE, VOCAB_SIZE = 4, 8, 64, 16384
GEOMETRY = "deepseek-v3"


def measure(engine: Any, recorder: "Recorder") -> list[dict[str, Any]]:
    """Return an engine's rows, one for each load. Collective over the job."""
    config = engine.vllm_config
    parallel, backend = config.parallel_config, config.attention_config.backend.name
    forward_context = config.compilation_config.static_forward_context
    layers = [layer for layer in forward_context.values() if hasattr(layer, "impl")]
    device = layers[0].kv_cache.device
    exchange = parallel.dcp_comm_backend if parallel.decode_context_parallel_size > 1 else "none"
    shared = {
        "geometry": GEOMETRY,
        "kernel": "dcpmla" if backend == "CUSTOM" else backend,
        "exchange": layers[0].impl.exchange.name if backend == "CUSTOM" else exchange,
        "tp": parallel.tensor_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
        "num_layers": len(layers),
        "heads": layers[0].num_heads * parallel.tensor_parallel_size,
        "block_size": BLOCK_SIZE,
        "dtype": "bfloat16",
    }
    rows = []
    for batch, context in LOADS:
        names = decode(engine, batch, context)
        if recorder.metadata.num_decode_tokens != batch or recorder.metadata.num_prefills:
            raise RuntimeError(f"vLLM's last step was not one of {batch} decodes")
        step_us = time_graph(recorder.graph, device)  # first: timing records graphs of its own
        timing = time_decode(layers, recorder.metadata, device)
        rows.append(shared | row_of("decode", timing, batch, context) | {"device_us": step_us})
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
    for num_new, context in PREFILLS:
        recorder.num_new = num_new
        step_us = time_prefill_step(engine, num_new + context, device)
        metadata = recorder.metadata
        if (metadata.num_reqs, metadata.num_actual_tokens) != (1, num_new):
            raise RuntimeError(f"vLLM's last step was not a prefill of {num_new} tokens")
        timing = time_prefill(layers, metadata, num_new, device)
        rows.append(shared | prefill_row(timing, num_new, context, step_us, metadata.prefill is None))
    recorder.num_new = 1
    if dist.get_rank() == 0:
        print(*rows, sep="\n", file=sys.stderr, flush=True)
    return rows


def row_of(operation: str, timing: Timing, batch: int, context: int) -> dict[str, Any]:
    """Return what rows of both operations have of their own."""
    times = {"median_us": timing.median_us, "in_graph": timing.in_graph}
    return {"operation": operation, "batch": batch, "context": context, **times}


def prefill_row(timing: Timing, num_new: int, context: int, step_us: float, is_absorbed: bool) -> dict[str, Any]:
    """Return the fields of a prefill's row."""
    route = "absorbed" if is_absorbed else "mha"
    return row_of("prefill", timing, 1, context) | {"step_us": step_us, "tokens": num_new, "route": route}


class Recorder:
    """What vLLM used last: the graph that it replayed, and the metadata of attention that it built.

    Of prompts that come, vLLM takes all but the last `num_new` tokens as cached.
    """

    graph: torch.cuda.CUDAGraph
    metadata: Any
    num_new = 1

    def __init__(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnectorScheduler
        from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

        replay, build = torch.cuda.CUDAGraph.replay, MLACommonMetadataBuilder.build
        match = DecodeBenchConnectorScheduler.get_num_new_matched_tokens

        def recorded_replay(graph: torch.cuda.CUDAGraph) -> None:
            self.graph = graph
            replay(graph)

        def recorded_build(builder: Any, *args: Any, **named: Any) -> Any:
            self.metadata = build(builder, *args, **named)
            return self.metadata

        def matched(scheduler: Any, request: Any, num_computed: int) -> tuple[int, bool]:
            num_matched, is_async = match(scheduler, request, num_computed)
            return max(0, num_matched - (self.num_new - 1)), is_async

        DecodeBenchConnectorScheduler.get_num_new_matched_tokens = matched
        torch.cuda.CUDAGraph.replay = recorded_replay
        MLACommonMetadataBuilder.build = recorded_build


def start_engine(num_ranks: int, backend: str, exchange: str) -> Any:
    """Return vLLM's engine over layers with random weights, and graphs of the loads' batches."""
    from vllm import LLM

    longest = max(*(context for _, context in LOADS), *(num_new + context for num_new, context in PREFILLS))
    num_cached = max(batch * context for batch, context in LOADS)
    config = config_of(
        GEOMETRY,
        architectures=["DeepseekV3ForCausalLM"],
        num_hidden_layers=NUM_LAYERS,
        first_k_dense_replace=NUM_LAYERS,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=163840,
        topk_method="noaux_tc",  # vLLM asks for these two
        scoring_func="sigmoid",
        dtype="bfloat16",
    )
    bytes_per_token = NUM_LAYERS * (config.kv_lora_rank + config.qk_rope_head_dim) * torch.bfloat16.itemsize
    shared = {"dcp_comm_backend": exchange} if exchange != "none" else {}
    batches = [batch for batch, _ in LOADS]
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        llm = LLM(
            model=directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            tensor_parallel_size=num_ranks,
            decode_context_parallel_size=num_ranks,
            distributed_executor_backend="external_launcher",
            attention_backend=backend,
            block_size=BLOCK_SIZE,
            max_model_len=longest + 4 * BLOCK_SIZE,
            max_num_seqs=max(batches),
            max_num_batched_tokens=max(num_new for num_new, _ in PREFILLS),
            kv_cache_memory_bytes=(num_cached // num_ranks + 2 * BLOCK_SIZE * max(batches)) * bytes_per_token,
            gpu_memory_utilization=0.1,  # has no effect, but this much must be free
            enable_prefix_caching=False,
            disable_custom_all_reduce=True,
            compilation_config={
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": batches,
            },
            # Requests' prompts are taken as cached: their blocks are filled with random numbers.
            kv_transfer_config={
                "kv_connector": "DecodeBenchConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 1.0},
            },
            **shared,
        )
    return llm.llm_engine


def decode(engine: Any, batch: int, context: int) -> list[str]:
    """Have the engine decode some tokens of so many requests at once; return their names."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=2 * BLOCK_SIZE, temperature=0, detokenize=False, ignore_eos=True)
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


def time_prefill(layers: list[Any], metadata: Any, num_tokens: int, device: torch.device) -> Timing:
    """Time vLLM's layer in a prefill, from queries to outputs: one layer's share of all layers' calls."""
    first = layers[0]
    new = partial(torch.randn, dtype=torch.bfloat16, device=device)
    query = new(num_tokens, first.num_heads, first.qk_nope_head_dim + first.qk_rope_head_dim)
    latents, rope = new(num_tokens, first.kv_lora_rank), new(num_tokens, 1, first.qk_rope_head_dim)
    output = new(num_tokens, first.num_heads * first.v_head_dim)

    def attend(index: int) -> None:
        layer = layers[index]
        layer.forward_impl(query, latents, rope, layer.kv_cache, metadata, output)

    with torch.inference_mode():
        return time_operation(attend, device, len(layers), seconds=1.0)


def time_decode(layers: list[Any], metadata: Any, device: torch.device) -> Timing:
    """Time what vLLM's layer calls between absorbed queries and merged rows: one layer's share of all layers' calls."""
    layer, num_tokens = layers[0], metadata.num_decode_tokens
    widths = layer.kv_lora_rank, layer.qk_rope_head_dim
    parts = [torch.randn(num_tokens, layer.num_heads, width, dtype=torch.bfloat16, device=device) for width in widths]

    def attend(index: int) -> Any:
        layer = layers[index]
        manager, impl = layer.dcp_manager, layer.impl
        if manager is None:
            return impl.forward_mqa(tuple(parts), layer.kv_cache, metadata, layer)
        out, lse = impl.forward_mqa(manager.query_gather(query), layer.kv_cache, metadata, layer)
        query_start_loc = metadata.query_start_loc[: metadata.num_decodes + 1]
        return manager.combine(out, lse, seq_lens=metadata.decode.seq_lens, query_start_loc=query_start_loc)

    query = torch.cat(parts, -1)
    with torch.inference_mode():
        return time_operation(attend, device, len(layers), seconds=1.0)
