"""A real vLLM engine with DeepSeek-V4 in each rank, started by torchrun: MODEL OPTIONS. Rank 0 prints a report."""

import json
import os
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM

from dcpmla.attention.compressed import layer
from dcpmla.attention.compressed.layer import CompressedAttention
from dcpmla.comm.nccl import AllToAll
from tests.engines.vllm_cases import CALLS, VOCABULARY, count, end, largest_error, prompts, run, without_merge
from tests.engines.vllm_v4_model import use_plain_torch


def main(directory: str, options: dict[str, Any]) -> None:
    use_plain_torch()
    count(CompressedAttention, "attend")
    for name in ("dcp_mla_decode", "attend_prefill", "compress"):
        count(layer, name)
    for name in ("gather_heads", "combine"):
        count(AllToAll, name)
    llm = LLM(
        model=directory,
        skip_tokenizer_init=True,
        tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
        distributed_executor_backend="external_launcher",
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_batched_tokens=100,
        max_num_seqs=20,
        max_logprobs=VOCABULARY,
        compilation_config={"custom_ops": ["none"]},
        **options,
    )
    model = AutoModelForCausalLM.from_pretrained(
        f"{directory}/reference", dtype=torch.float32, attn_implementation="eager"
    )
    config = llm.llm_engine.vllm_config
    report: dict[str, Any] = {"blocks": config.cache_config.num_gpu_blocks, "warm-up": dict(CALLS)}
    CALLS.clear()
    requests = prompts()
    for turn, aborted in (("first", None), ("aborted", 1)):
        outputs = run(llm, requests, aborted)
        report[turn] = {
            "error": largest_error(model, requests, outputs),
            "ended": sum(each is not None and each.outputs[0].finish_reason == "length" for each in outputs),
        }
    report["calls"] = dict(CALLS)
    if options.get("decode_context_parallel_size", 1) > 1:
        AllToAll.combine = without_merge
        few = requests[:1] + requests[-2:]
        report["without merge"] = largest_error(model, few, run(llm, few))
    end(report)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
