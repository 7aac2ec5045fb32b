"""Texts as they come, from Python:

    torchrun --standalone --nproc-per-node 4 examples/stream.py examples/needle/model 4

or, as one process, `python examples/stream.py examples/needle/model`. The number is how many ranks share the cache.
"""

import sys

from dcpmla import LLM, SamplingParams

PROMPTS = ["amber-ant 123; amber-apple 456; amber-ant?", "amber-ant 123; amber-apple 456; amber-apple?"]


def main(model: str, dcp_size: int = 1) -> None:
    with LLM(model, decode_context_parallel_size=dcp_size) as llm:  # every rank runs the same lines
        params = SamplingParams(max_new_tokens=4, temperature=0.2, seed=1)
        for request, text in llm.stream(PROMPTS, params):
            if llm.rank == 0:
                print(f"{request.request_id}: {text!r}", flush=True)
                if request.finish_reason:
                    print(f"{request.request_id}: {request.finish_reason}, {request.metrics()}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
