"""The engine from Python, streaming: `torchrun --standalone --nproc-per-node 4 examples/stream.py
examples/needle/model`.
"""

import sys
from datetime import timedelta

from dcpmla import DCPConfig, init_mesh
from dcpmla.comm.select import select_exchange
from dcpmla.integrations.loading import load_engine, open_model
from dcpmla.job.bootstrap import distributed, read_launcher
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams

PROMPTS = ["amber-ant 123; amber-apple 456; amber-ant?", "amber-ant 123; amber-apple 456; amber-apple?"]


def main(model: str) -> None:
    ranks = read_launcher("auto")
    with distributed(ranks, timedelta(minutes=10)):
        mesh = init_mesh(ranks.num_ranks, decode_context_parallel_size=ranks.num_ranks)
        dcp = DCPConfig(tensor_parallel_size=mesh.tp_size, decode_context_parallel_size=mesh.dcp_size)
        selection = select_exchange(dcp, mesh.dcp_group, ranks.device)
        engine = load_engine(open_model(model), dcp, mesh, selection, ranks.device, kv_cache_memory_bytes=1 << 28)

        def show(request: Request, text: str) -> None:
            if ranks.is_first and text:
                print(f"{request.request_id}: {text!r}", flush=True)

        # Every rank adds the same requests, in the same order; more may be added while the loop runs.
        for index, prompt in enumerate(PROMPTS):
            engine.add(
                prompt,
                SamplingParams(max_new_tokens=4, temperature=0.5 * index, seed=index),
                request_id=index,
                on_token=show,
            )
        for request in engine.run():
            if ranks.is_first:
                print(f"{request.request_id}: {request.finish_reason}, {request.metrics()}", flush=True)
        engine.close()  # before the process groups: decode graphs hold their operations


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
