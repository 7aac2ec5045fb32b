"""Kimi-K3 in a real vLLM engine in each rank: MODEL OPTIONS. Rank 0 prints a report as JSON."""

import json
import sys
from typing import Any

from dcpmla.comm.nccl import AllToAll
from dcpmla.integrations.vllm import impl
from dcpmla.integrations.vllm.backend import DCPMLAMetadataBuilder
from tests.engines.vllm_cases import CALLS, compare, count, end, largest_error, prompts, run, start, without_merge
from tests.engines.vllm_kimi import Oracle, replace_kernels

THRESHOLD = 32  # Chunks of up to 100 tokens are then short and long prefills.


def main(directory: str, options: dict[str, Any]) -> None:
    replace_kernels()
    DCPMLAMetadataBuilder.reorder_batch_threshold = THRESHOLD
    count(impl, "dcp_mla_decode")
    count(impl, "dcp_mla_prefill")
    for name in ("gather_heads", "combine"):
        count(AllToAll, name)
    # vLLM copies states of linear attention by kernels for GPUs.
    llm = start(directory, enable_prefix_caching=False, **options)
    report: dict[str, Any] = {"warm-up": dict(CALLS)}
    CALLS.clear()
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    report["layers"] = [[type(layer).__name__, type(getattr(layer, "impl", None)).__name__] for layer in layers]
    model, requests = Oracle(directory), prompts()[::2]
    for name, aborted in (("first", None), ("aborted", 1)):
        outputs = run(llm, requests, aborted)
        report[name] = compare(model, requests, outputs) | {"of": len(requests)}
    report["calls"] = dict(CALLS)
    AllToAll.combine = without_merge
    report["without merge"] = largest_error(model, requests[:2], run(llm, requests[:2]))
    end(report)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
