"""A real vLLM engine with DeepSeek-V4 in each rank: MODEL OPTIONS. Rank 0 prints a report."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_worker import Worker

from dcpmla.attention.layers.compressed import layer
from dcpmla.attention.layers.compressed.cache import CompressedCache
from dcpmla.attention.layers.compressed.layer import CompressedAttention
from dcpmla.comm.nccl import AllToAll
from dcpmla.integrations.vllm.compressed.backend import CompressedMetadataBuilder, LazyStep
from tests.engines.vllm_cases import (
    CALLS,
    VOCABULARY,
    compare,
    count,
    end,
    prompts,
    run,
    schedule_ahead,
    start,
    without_merge,
)
from tests.engines.vllm_drafts import DRAFTED, compare_drafts, record_drafts
from tests.engines.vllm_v4_drafts import GUIDES, Module, guide_drafts, use_plain_module
from tests.engines.vllm_v4_model import round_reference, use_plain_torch

BLOCK = 256  # vLLM's on CPUs


def use_static_steps() -> None:
    """Lay out steps of decodes alone, of as many tokens each, as for a CUDA graph."""
    build = CompressedMetadataBuilder.build

    def static(self: CompressedMetadataBuilder, prefix: int, common: Any, fast_build: bool = False) -> LazyStep:
        query_lens = common.query_start_loc_cpu.diff()
        is_uniform = query_lens.min() == query_lens.max() <= self.reorder_batch_threshold
        if self.layers is not None or not is_uniform:
            return build(self, prefix, common, fast_build)
        CALLS["static steps"] += 1
        return self.build_for_cudagraph_capture(common)

    CompressedMetadataBuilder.build = static


def run_with_dummies(llm: LLM, requests: list[list[int]]) -> list[Any]:
    """Run requests, and a dummy batch after each step, as idle ranks of data parallelism do: it must change no state of
    a request.
    """
    step = llm.llm_engine.step

    def step_and_run_dummies() -> Any:
        outputs = step()
        CALLS["dummy batches"] += 1
        llm.collective_rpc("execute_dummy_batch")
        return outputs

    llm.llm_engine.step = step_and_run_dummies
    outputs = run(llm, requests)
    llm.llm_engine.step = step
    return outputs


def main(directory: str, options: dict[str, Any]) -> None:
    use_plain_torch()
    has_module = "speculative_config" in options
    if has_module:
        use_plain_module()
        record_drafts()
    count(CompressedAttention, "attend")
    for name in ("dcp_mla_decode", "attend_prefill"):
        count(layer, name)
    for name in ("gather_heads", "combine"):
        count(AllToAll, name)
    count(Scheduler, "_preempt_request")
    count(CompressedCache, "copy_state")
    if not torch.cuda.is_available():
        Worker.determine_available_memory = lambda worker: 0  # workers of CPUs have another of their own
    if options.get("async_scheduling"):
        schedule_ahead()
    llm = start(directory, **{"num_gpu_blocks_override": None} | options)
    model = AutoModelForCausalLM.from_pretrained(
        f"{directory}/reference", dtype=torch.float32, attn_implementation="eager"
    )
    if options.get("kv_cache_dtype") == "fp8":
        round_reference()
    report = describe(llm)
    block = report["tokens"] // report["blocks"]
    CALLS.clear()
    if has_module:
        DRAFTED.clear()  # in warm-ups
        end(report | with_drafts(llm, model, block))
    requests = prompts()
    # These need a second block at the same time.
    tight = [requests[1][: BLOCK - 1 - index] for index in range(4)]
    for turn, of_turn, aborted in (("first", requests, None), ("aborted", requests, 1), ("tight", tight, None)):
        report[turn] = compare(model, of_turn, run(llm, of_turn, aborted))
    report["dummies"] = compare(model, tight, run_with_dummies(llm, tight))
    report["calls"] = dict(CALLS)
    report["joined weights"] = sum(map(has_joined_weights, stack_of(llm).layers))
    report["reuse"] = reuse(llm, model, block)
    if torch.cuda.is_available():
        end(report)
    use_static_steps()
    report["static"] = compare(model, tight, run(llm, tight)) | {"steps": CALLS["static steps"]}
    if options.get("decode_context_parallel_size", 1) > 1:
        AllToAll.combine = without_merge
        report["without merge"] = compare(model, tight, run(llm, tight))
    end(report)


def with_drafts(llm: LLM, model: Any, block: int) -> dict[str, Any]:
    """Return the errors of answers with the module's drafts, the number of drafts that a module in plain torch makes,
    too, and the errors with drafts that are mostly accepted, with reused prefixes, and with static steps.
    """
    report, requests = dict[str, Any](), prompts()[1:9]
    steps = CALLS["attend"]
    outputs = run(llm, requests)
    report["first"] = compare(model, requests, outputs) | {"calls": CALLS["attend"] - steps}
    report["drafts"] = compare_drafts(Module(), requests, outputs)
    names = [f"{CALLS['runs'] + 1}-{index}" for index in range(len(requests))]
    tokens = [request + list(output.outputs[0].token_ids) for request, output in zip(requests, outputs, strict=True)]
    GUIDES.update({f"{name}-": each for name, each in zip(names, tokens, strict=True)})
    guide_drafts()
    steps = CALLS["attend"]
    report["guided"] = compare(model, requests, run(llm, requests)) | {"calls": CALLS["attend"] - steps}
    report["reuse"] = reuse(llm, model, block)
    if torch.cuda.is_available():
        return report
    use_static_steps()
    few = requests[2:8]  # together in one step, then in steps of as many tokens each
    report["static"] = compare(model, few, run(llm, few)) | {"steps": CALLS["static steps"]}
    return report


def reuse(llm: LLM, model: Any, block: int) -> dict[str, Any]:
    """Return the errors of answers to prompts whose beginnings are reused, and how many tokens each has reused: one by
    one a prompt twice, one that parts from it in its last block and two in an earlier one, and a prompt whose answer
    ends a block, with another turn; then together; after a reset; and without the copies of states.

    Args:
        block: Tokens of a block.
    """
    generator = torch.Generator().manual_seed(2)
    common, *ends = torch.randint(2, VOCABULARY, (6, 3 * block), generator=generator).tolist()
    num_shared = (512 // block - 1) * block + 9
    common, turn = common[: num_shared + block], ends[3][: block - 4]
    requests = [common, common, common[:-6] + ends[0][:6]]
    requests += [common[:num_shared] + end[: block - 20] for end in ends[1:3]]
    llm.reset_prefix_cache()
    outputs = [run(llm, [request])[0] for request in [*requests, turn]]
    requests += [turn, turn + list(outputs[-1].outputs[0].token_ids) + ends[4][:9]]
    outputs += run(llm, requests[-1:])
    report = {"one by one": compare(model, requests, outputs)}
    few = requests[1:3] + requests[-1:]
    report["together"] = compare(model, few, run(llm, few))
    llm.reset_prefix_cache()
    report["after a reset"] = compare(model, [common], run(llm, [common]))
    copy, stack = CompressedCache.copy_state, stack_of(llm)
    CompressedCache.copy_state = lambda self, source, target: None
    for items in stack.cache.state_items:
        items.pages[len(stack.states) :].zero_()
    report["without copies"] = compare(model, [common], run(llm, [common]))
    CompressedCache.copy_state = copy
    llm.reset_prefix_cache()
    return report


def left_for_pages(llm: LLM) -> int | None:
    """Return the bytes that this package's hook leaves of none; None on GPUs, where vLLM measures memory."""
    if torch.cuda.is_available():
        return None
    return Worker.determine_available_memory(
        SimpleNamespace(model_runner=llm.llm_engine.model_executor.driver_worker.worker.model_runner)
    )


def describe(llm: LLM) -> dict[str, Any]:
    """Return the sizes of the cache, and the number of layers that have memory of vLLM's."""
    config, stack = llm.llm_engine.vllm_config, stack_of(llm)
    plan, memory = stack.cache.sizes, stack.leader.kv_cache.untyped_storage()
    return {
        "blocks": plan.num_blocks,
        "tokens": plan.tokens_total,
        "layers": len(config.compilation_config.static_forward_context),
        "bytes": memory.nbytes(),
        "needed": plan.bytes_per_rank,
        "in one piece": all(tensor.untyped_storage().data_ptr() == memory.data_ptr() for tensor in stack.cache.tensors),
        "pages": stack.pages(config).page_size_bytes * plan.num_blocks,
        "fixed": stack.fixed_bytes,
        "left for pages": left_for_pages(llm),
        "prefix caching": config.cache_config.enable_prefix_caching,
        "cuts prompts": config.scheduler_config.max_num_batched_tokens < BLOCK,
        "async": config.scheduler_config.async_scheduling,
    }


def has_joined_weights(attention: Any) -> bool:
    """Return whether the projections of a layer's hidden states that are not quantized are one matrix."""
    linears = [attention.fused_wqa_wkv, *(compressor.fused_wkv_wgate for compressor in attention._compressors())]
    linears += [] if attention.indexer is None else [attention.indexer.weights_proj]
    return len({linear.weight.untyped_storage().data_ptr() for linear in linears}) == 1 < len(linears)


def stack_of(llm: LLM) -> Any:
    """Return the attention layers of this rank."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return next(iter(layers)).stack


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
