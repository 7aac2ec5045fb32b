"""Kimi-K3 in a real vLLM engine in each rank: MODEL OPTIONS. Rank 0 prints a report as JSON."""

import json
import os
import sys
from typing import Any

from vllm import LLM

from dcpmla.comm.nccl import AllToAll
from dcpmla.integrations.vllm import impl
from dcpmla.integrations.vllm.backend import DCPMLAMetadataBuilder
from tests.engines.vllm_cases import CALLS, VOCABULARY, count, end, largest_error, prompts, run, without_merge
from tests.engines.vllm_kimi import Oracle, replace_kernels

THRESHOLD = 32  # Chunks of up to 100 tokens are then short and long prefills.


def main(directory: str, options: dict[str, Any]) -> None:
    replace_kernels()
    DCPMLAMetadataBuilder.reorder_batch_threshold = THRESHOLD
    count(impl, "dcp_mla_decode")
    count(impl, "dcp_mla_prefill")
    for name in ("gather_heads", "combine"):
        count(AllToAll, name)
    llm = LLM(
        model=directory,
        skip_tokenizer_init=True,
        tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
        distributed_executor_backend="external_launcher",
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=20,
        max_num_batched_tokens=100,
        enable_prefix_caching=False,  # vLLM copies states of linear attention by kernels for GPUs
        enforce_eager=True,
        compilation_config={"custom_ops": ["none"]},
        num_gpu_blocks_override=256,
        max_logprobs=VOCABULARY,
        seed=0,
        **options,
    )
    report: dict[str, Any] = {"warm-up": dict(CALLS)}
    CALLS.clear()
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    report["layers"] = [[type(layer).__name__, type(getattr(layer, "impl", None)).__name__] for layer in layers]
    model, requests = Oracle(directory), prompts()[::2]
    for name, aborted in (("first", None), ("aborted", 1)):
        outputs = run(llm, requests, aborted)
        ended = sum(output is not None and output.outputs[0].finish_reason == "length" for output in outputs)
        report[name] = {"error": largest_error(model, requests, outputs), "ended": ended, "of": len(requests)}
    report["calls"] = dict(CALLS)
    AllToAll.combine = without_merge
    report["without merge"] = largest_error(model, requests[:2], run(llm, requests[:2]))
    end(report)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
