"""Prompts on some ranks, answers on the others: two engines in one world, without a server.

    torchrun --standalone --nproc-per-node 4 examples/disaggregated.py examples/needle/model

The first half of the ranks prefills, each rank with a whole cache (DCP 1); the second half decodes over one cache that
all of its ranks share. Blocks move between them over torch.distributed. Any even number of ranks prints the same.
"""

import sys
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from dcpmla import DCPConfig, DCPMesh, Engine, EngineOptions, SamplingParams, load_engine, select_exchange
from dcpmla.job.bootstrap import Ranks, distributed, read_launcher
from dcpmla.runtime.handoffs import Handoffs
from dcpmla.runtime.request import Request
from dcpmla.transfer.incoming import Incoming
from dcpmla.transfer.layout import CacheLayout, describe
from dcpmla.transfer.outgoing import Outgoing
from dcpmla.transfer.parts import RowMover
from dcpmla.transfer.point_to_point import PointToPointTransport
from dcpmla.transfer.transport import Peer, rank_name

# Long, because an engine computes a few missing tokens itself, and different from the first token on, because it would
# not ask for blocks that it has. A prompt that is prefilled and not asked for holds its blocks for two minutes.
PROMPTS = [
    "amber-ant 123; amber-apple 456; " * 40 + "amber-ant?",
    "amber-apple 456; amber-ant 123; " * 40 + "amber-apple?",
]
NUM_SLOTS, SLOT_BYTES = 4, 1 << 20  # staging memory of a rank


def make_mesh(ranks: Ranks) -> tuple[DCPMesh, DCPConfig]:
    """Return the groups of this rank's job, and the layout of its cache. All ranks make all groups."""
    half = ranks.num_ranks // 2
    jobs = [dist.new_group(list(range(start, start + half))) for start in (0, half)]
    alone = [dist.new_group([rank]) for rank in range(half)]
    if ranks.rank < half:
        dcp = DCPConfig(tensor_parallel_size=half, block_size=64)
        return DCPMesh(tp_group=jobs[0], dcp_group=alone[ranks.rank]), dcp
    dcp = DCPConfig(tensor_parallel_size=half, decode_context_parallel_size=half, block_size=16)
    return DCPMesh(tp_group=jobs[1], dcp_group=jobs[1]), dcp


def link(engine: Engine, name: str, other: str, ranks: Ranks, store: dist.Store) -> Handoffs:
    """Connect this rank's engine to the other job, of which the store has a description, and return its transfers."""
    mesh, sends = engine.mesh, name == "prefill"
    memory = torch.empty(NUM_SLOTS, SLOT_BYTES, dtype=torch.uint8, device=ranks.device)
    own_name = rank_name(name, mesh.tp_rank)
    transport = PointToPointTransport(own_name, memory, dist.new_group(), store.clone())  # type: ignore[attr-defined]
    layout = describe(engine.cache, engine.dcp)
    store.set(own_name, transport.metadata().hex())
    store.set(name, msgspec.json.encode(layout).decode())
    rows = RowMover(engine.cache, layout)
    ends = transport, rows, layout, mesh.tp_rank
    engine.link(Outgoing(*ends) if sends else None, None if sends else Incoming(*ends))
    agents = [bytes.fromhex(store.get(rank_name(other, rank)).decode()) for rank in range(ranks.num_ranks // 2)]
    assert engine.handoffs is not None
    engine.handoffs.connect(Peer(other, msgspec.json.decode(store.get(other), type=CacheLayout), agents))
    return engine.handoffs


def prefill(engine: Engine, store: dist.Store) -> None:
    """Prefill all prompts, and step until their blocks are sent."""
    for number, prompt in enumerate(PROMPTS):
        engine.add(prompt, SamplingParams(temperature=0.2, seed=1), request_id=number, handoff=f"prompt {number}")
    while engine.has_requests or engine.has_transfers:
        for request in engine.step().finished:
            store.set(f"first token of {request.request_id}", str(request.token_ids[0]))


def decode(engine: Engine, handoffs: Handoffs, store: dist.Store) -> list[Request]:
    """Decode the answers to all prompts, after the first tokens, which the other job sends."""
    params = SamplingParams(max_new_tokens=4, temperature=0.2, seed=1)
    requests = [engine.add(prompt, params, request_id=number) for number, prompt in enumerate(PROMPTS)]
    while engine.has_requests or engine.has_transfers:
        wanted = engine.step().wanted
        for request in wanted:
            handoffs.pull(request, "prefill", f"prompt {request.request_id}")
        for request in wanted:  # blocks arrive while this rank waits
            engine.take_first(request, int(store.get(f"first token of {request.request_id}")))
    return requests


def main(model: str) -> None:
    ranks = read_launcher("auto")
    if ranks.num_ranks % 2:
        sys.exit(f"{ranks.num_ranks} ranks are no two jobs of equal size; start an even number")
    with distributed(ranks, timedelta(minutes=10)) as store:
        name, other = ("prefill", "decode") if ranks.rank < ranks.num_ranks // 2 else ("decode", "prefill")
        mesh, dcp = make_mesh(ranks)
        exchange = select_exchange(dcp, mesh.dcp_group, ranks.device)
        options = EngineOptions(kv_cache_memory_bytes=1 << 22)
        engine = load_engine(model, dcp, mesh, exchange, ranks.device, options)
        handoffs = link(engine, name, other, ranks, store)
        if name == "prefill":
            prefill(engine, store)
        else:
            for request in decode(engine, handoffs, store):
                if mesh.tp_rank == 0:
                    num_bytes = handoffs.received.bytes
                    print(f"{request.request_id}: {request.text!r}, {num_bytes:,} bytes have come", flush=True)
        engine.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
