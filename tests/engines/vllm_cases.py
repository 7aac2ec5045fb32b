"""A real vLLM engine in each rank: MODEL OPTIONS. Rank 0 prints a report as a line of JSON.

OPTIONS are the engine's, and `threshold`: the most new tokens of a decode in place of the plug-in's.
"""

import json
import math
import os
import sys
from collections import Counter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.platforms.cpu import CpuPlatform

from dcpmla.attention.step import metadata as step_module
from dcpmla.comm.nccl import AllToAll
from dcpmla.integrations.vllm import impl
from dcpmla.integrations.vllm.backend import DCPMLAMetadataBuilder
from dcpmla.integrations.vllm.exchange import install
from tests.engines import vllm_quantized  # noqa: F401
from tests.engines.rounded import logprobs_over_rounded_latents, rounded
from tests.engines.vllm_drafts import Module, compare_drafts, record_drafts

VOCABULARY, NEW_TOKENS, MAX_BATCHED = 512, 8, 100
ENGINE = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 20,
    "max_num_batched_tokens": MAX_BATCHED,
    "enforce_eager": True,
    "compilation_config": {"custom_ops": ["none"]},
    "num_gpu_blocks_override": 256,
    "max_logprobs": VOCABULARY,
}
CALLS: Counter[str] = Counter()


def start(directory: str, **options: Any) -> LLM:
    """Start an engine on this rank of a job, with options in place of those in ENGINE."""
    return LLM(
        model=directory,
        skip_tokenizer_init=True,
        tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
        distributed_executor_backend="external_launcher",
        seed=0,
        **ENGINE | options,
    )


def schedule_ahead() -> None:
    """Let vLLM's CPU platform schedule a step before it knows the results of the last one, as GPUs do."""
    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def count(owner: Any, name: str) -> None:
    """Count the calls of a function."""
    original = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        CALLS[name] += 1
        if name == "dcp_mla_decode":
            call = args[0]
            CALLS["in a fixed order"] += call.num_tile_lanes is not None
            CALLS["pieces"] += call.request_index is not None
            CALLS["several tokens"] += call.request_index is None and call.max_query_len > 1
            parts = [part for part in (call.q, call.q_pe) if part is not None]
            CALLS["queries in two parts"] += len({part.untyped_storage().data_ptr() for part in parts}) == 2
        return original(*args, **options)

    setattr(owner, name, counted)


def count_mixed_steps() -> None:
    """Count the steps of short and long prefills, and those cut into several parts."""
    build = DCPMLAMetadataBuilder.build

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        metadata = build(self, *args, **options)
        parts = () if metadata.decode is None else metadata.decode.parts
        CALLS["mixed steps"] += metadata.prefill is not None and any(part.queries is not None for _, part in parts)
        CALLS["steps in parts"] += len(parts) > 1
        return metadata

    DCPMLAMetadataBuilder.build = counted


def prompts() -> list[list[int]]:
    """Return 20 prompts of 1 to 300 tokens, two of them with a common beginning."""
    generator = torch.Generator().manual_seed(1)
    draw = torch.randint(2, VOCABULARY, (20, 300), generator=generator).tolist()
    lengths = [300, 1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200]
    return [[7], *(tokens[:length] for tokens, length in zip(draw, lengths, strict=False))][:19] + [
        draw[0][:150] + draw[19][:60]
    ]


def run(llm: LLM, requests: list[list[int]], aborted: int | None = None) -> list[Any]:
    """Return the final output of each request. All are added at once; one is aborted on the way."""
    params = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0, detokenize=False, ignore_eos=True, logprobs=VOCABULARY
    )
    engine, ended = llm.llm_engine, {}
    CALLS["runs"] += 1
    names = [f"{CALLS['runs']}-{index}" for index in range(len(requests))]
    for name, tokens in zip(names, requests, strict=True):
        engine.add_request(name, {"prompt_token_ids": tokens}, params)
    step = 0
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
        step += 1
        if step == 4 and aborted is not None:
            engine.abort_request([names[aborted]])
    return [ended.get(name) for name in names]


@torch.inference_mode()
def largest_error(model: Any, requests: list[list[int]], outputs: list[Any]) -> float:
    """Return the largest difference of any logprob from transformers'."""
    worst = 0.0
    for tokens, output in zip(requests, outputs, strict=True):
        if output is None or output.outputs[0].finish_reason == "abort":
            continue
        new = list(output.outputs[0].token_ids)
        expected = model(torch.tensor([tokens + new])).logits[0].log_softmax(-1)
        for index, found in enumerate(output.outputs[0].logprobs):
            got = torch.tensor([found[token].logprob for token in range(VOCABULARY)])
            worst = max(worst, float((got - expected[len(tokens) - 1 + index]).abs().max()))
    return worst


def counts_of(outputs: list[Any]) -> dict[str, Any]:
    """Return the number of requests that ended, and how many tokens each has reused."""
    present = [output for output in outputs if output is not None]
    ended = sum(output.outputs[0].finish_reason == "length" for output in present)
    return {"ended": ended, "cached": [output.num_cached_tokens for output in present]}


def compare(model: Any, requests: list[list[int]], outputs: list[Any]) -> dict[str, Any]:
    """Return the largest difference of any logprob from a model's, and the counts of the outputs."""
    return {"error": largest_error(model, requests, outputs)} | counts_of(outputs)


def rounded_errors(llm: LLM, model: Any, chunk: int) -> dict[str, float]:
    """Return the largest differences of any logprob from transformers', over latents and queries in e4m3 and over exact
    ones, for a few prompts one by one.

    Args:
        chunk: Most new tokens of a prompt whose keys are up-projected; 1 if all queries are absorbed.
    """
    found, exact = 0.0, 0.0
    for prompt in prompts()[1:-1:4]:  # the last one has the beginning of another, which is cached
        (output,) = run(llm, [prompt])
        new = list(output.outputs[0].token_ids)
        expected = logprobs_over_rounded_latents(model, prompt, new[:-1], chunk, rounds_queries=True)
        got = torch.tensor([[row[token].logprob for token in range(VOCABULARY)] for row in output.outputs[0].logprobs])
        found = max(found, float((got - expected).abs().max()))
        exact = max(exact, largest_error(model, [prompt], [output]))
    return {"over rounded": found, "over exact": exact}


def main(directory: str, options: dict[str, Any]) -> None:
    threshold = options.pop("threshold", DCPMLAMetadataBuilder.reorder_batch_threshold)
    DCPMLAMetadataBuilder.reorder_batch_threshold = threshold
    step_module.PART_ROWS = 256  # 32 tokens of 8 heads, so that steps have several parts
    count_mixed_steps()
    count(impl, "dcp_mla_decode")
    count(impl, "dcp_mla_prefill")
    for name in ("gather_heads", "combine", "start_context"):
        count(AllToAll, name)
    has_module = options.get("speculative_config", {}).get("method") == "mtp"
    if has_module:
        record_drafts()
        count(DCPMLAMetadataBuilder, "update_draft_decode_metadata")
    llm = start(directory, **options)
    warm_up = dict(CALLS)
    CALLS.clear()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    report: dict[str, Any] = {"warm-up": warm_up, "runner": 1 + llm.llm_engine.vllm_config.use_v2_model_runner}
    if options.get("quantization") == "rounded":
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.weight.data = rounded(layer.self_attn.kv_b_proj.weight.data)
    if options.get("kv_cache_dtype") == "fp8":
        end(report | rounded_errors(llm, model, MAX_BATCHED if threshold == 1 else 1) | {"calls": dict(CALLS)})
    requests = prompts()
    for turn, aborted in (("first", None), ("again", 18)):
        outputs = run(llm, requests, aborted)
        report[turn] = compare(model, requests, outputs)
        if has_module and turn == "first":
            report["drafts"] = compare_drafts(Module(directory), requests, outputs)
    report["calls"] = dict(CALLS)
    if options.get("decode_context_parallel_size", 1) > 1:
        report |= exchange_report(llm, model, requests)
    end(report)


def end(report: Any) -> NoReturn:
    """End this rank, the first one with a report."""
    if dist.get_rank() == 0:
        print(json.dumps(report), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads wait for requests


def exchange_report(llm: LLM, model: Any, requests: list[list[int]]) -> dict[str, dict[str, float]]:
    """Return the errors of the exchange by itself, and of answers without the merge, which is gone from then on."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    (manager, *_) = (layer.dcp_manager for layer in layers if hasattr(layer, "dcp_manager"))
    alone = max(exchange_alone(manager, is_base_e) for is_base_e in (True, False))
    AllToAll.combine = without_merge
    few = requests[:1] + requests[-2:]
    wrong = largest_error(model, few, run(llm, few))
    return {"exchange alone": {"error": alone}, "without merge": {"error": wrong}}


def exchange_alone(manager: Any, is_base_e: bool) -> float:
    """Return the largest error of vLLM's `dcp_manager` with this package's exchange in it (DCPMLA_VLLM=exchange)."""
    install()
    rank, size, heads = dist.get_rank(), dist.get_world_size(), 8
    torch.manual_seed(rank)
    tokens = size + 1
    q, out, lse = torch.randn(tokens, heads // size, 16), torch.randn(tokens, heads, 16), torch.randn(tokens, heads)
    lse[rank] = math.nan if rank % 2 else math.inf  # Kernels mark a query without keys by either.
    ranks: list[Any] = [None] * size
    dist.all_gather_object(ranks, (q, out, lse))
    queries, outs, lses = (torch.stack(each).double() for each in zip(*ranks, strict=True))
    weights = lses.where(lses < math.inf, -math.inf).softmax(0)[..., None]
    mine = slice(rank * heads // size, (rank + 1) * heads // size)
    combine = manager._init_combine(heads // size, 16, torch.float32, is_base_e, False)
    got = combine(out, lse if is_base_e else lse / math.log(2), seq_lens=None, query_start_loc=None)
    gathered = manager._init_query_gather(heads // size, 16, torch.float32)(q)
    assert torch.equal(gathered.double(), queries.transpose(0, 1).flatten(1, 2))
    return float((got - (weights * outs).sum(0)[:, mine]).abs().max())


def without_merge(self: AllToAll, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's heads over its own tokens alone."""
    rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
    return out.chunk(size, 1)[rank].contiguous(), lse.chunk(size, 1)[rank].contiguous()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
