"""The connector of the benchmark inside vLLM, over a substitute for an engine. Prints a report as JSON."""

import json
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from benchmarks.vllm_contexts import Contexts


def engine_of(caches: list[torch.Tensor], zeroer: Any) -> Any:
    """Return a substitute for an engine with these caches."""
    runner = SimpleNamespace(kv_caches=caches, kv_block_zeroer=zeroer)
    return SimpleNamespace(
        engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=SimpleNamespace(connector=None))),
        collective_rpc=lambda function: [function(SimpleNamespace(model_runner=runner))],
    )


def main() -> None:
    shared = torch.zeros(4, 256, dtype=torch.uint8)
    # A layer's sums and another's entries share memory, as in DeepSeek-V4; a layer without a cache has an empty one.
    caches = [shared[:, 64:], shared[:, :64].view(torch.float32), torch.empty(0)]
    zeroer = SimpleNamespace(zero_block_ids=lambda blocks: shared.zero_())
    engine = engine_of(caches, zeroer)
    contexts = Contexts(engine)
    contexts.fill()
    zeroer.zero_block_ids([1])
    request = SimpleNamespace(num_tokens=100)
    matched = [contexts.get_num_new_matched_tokens(request, 0), contexts.get_num_new_matched_tokens(request, 64)]
    contexts.num_new = 100
    with torch.inference_mode():
        plain = [torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(4, 8, dtype=torch.bfloat16)]
    Contexts(engine_of(plain, None)).fill()
    report = {
        "is connector": engine.engine_core.engine_core.scheduler.connector is contexts,
        "has groups": isinstance(contexts, SupportsHMA),
        "bytes": [int(shared.min()), int(shared.max())],
        "largest": float(caches[1].max()),
        "matched": [*matched, contexts.get_num_new_matched_tokens(request, 0)],
        "plain": min(float(cache.float().std()) for cache in plain),
        "free at once": contexts.request_finished_all_groups(request, ([1],)),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
