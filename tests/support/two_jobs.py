"""A job that prefills and one that decodes, each of several ranks, over NIXL: all prompts move between them."""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch.distributed as dist

from dcpmla.config import DCPConfig
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.open_model import open_model
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.integrations.transfers import cache_facts
from dcpmla.runtime import engine as engine_module
from dcpmla.runtime.agreement import News
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.request import TokenLogprobs
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.stats import TransferTotals
from dcpmla.transfer import worker
from dcpmla.transfer.incoming import Incoming
from dcpmla.transfer.layout import CacheLayout, describe
from dcpmla.transfer.outgoing import Outgoing
from dcpmla.transfer.parts import RowMover
from dcpmla.transfer.staging import allocate_staging
from dcpmla.transfer.transport import Peer, rank_name
from tests.support.ranks import run_ranks
from tests.support.whole_models import load_engine_on_rank

SLOT_BYTES = 1 << 15  # several parts for each prompt


class Prompt(NamedTuple):
    """A prompt and its parameters."""

    token_ids: list[int]
    params: SamplingParams


class Answer(NamedTuple):
    """What a rank of the decoding job has of a request."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]


class Decoded(NamedTuple):
    """What a rank of the decoding job has done.

    Attributes:
        num_prefilled: Tokens in steps with prompts.
        drafts: Known tokens of a request, and the drafts that followed.
    """

    answers: list[Answer]
    num_prefilled: int
    received: TransferTotals
    drafts: list[tuple[list[int], list[int]]]


class Meeting:
    """Files by which ranks of two jobs exchange what servers exchange over HTTP."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, name: str, content: bytes) -> None:
        path = self._directory / name
        path.with_suffix(".part").write_bytes(content)
        path.with_suffix(".part").rename(path)

    def get(self, name: str) -> bytes:
        while not self.has(name):
            time.sleep(0.01)
        return (self._directory / name).read_bytes()

    def has(self, name: str) -> bool:
        assert not (self._directory / "failed").exists(), "the other job has failed"
        return (self._directory / name).exists()


def make_engine(directory: Path, dcp: DCPConfig, options: EngineOptions, device_type: str) -> Engine:
    # Ranks share a few cores, which those that wait must leave to others.
    engine_module._POLL_SECONDS, worker._BUSY = 1e-2, 2e-3
    return load_engine_on_rank(directory, dcp, options, 256, device_type)


def link(engine: Engine, directory: Path, meeting: Meeting, name: str, other: str, num_others: int) -> None:
    """Connect a rank of a job to all ranks of the other."""
    from dcpmla.transfer.nixl import NixlTransport

    rank, device = dist.get_rank(), engine.cache.tensors[0].device
    files, model = open_model(str(directory)), engine.model
    assert isinstance(model, ShardedModel)
    layout = describe(engine.cache, engine.dcp, cache_facts(files, model, engine.cache.sizes))
    transport = NixlTransport(rank_name(name, rank), allocate_staging(device, 4, SLOT_BYTES))
    meeting.put(f"{name}{rank}", transport.metadata())
    if rank == 0:
        meeting.put(name, msgspec.json.encode(layout))
    mover = RowMover(engine.cache, layout)
    if name == "prefill":
        engine.link(Outgoing(transport, mover, layout, rank), None)
    else:
        engine.link(None, Incoming(transport, mover, layout, rank))
    agents = [meeting.get(f"{other}{peer}") for peer in range(num_others)]
    engine.handoffs.connect(Peer(other, msgspec.json.decode(meeting.get(other), type=CacheLayout), agents))


def prefill(
    directory: Path, dcp: DCPConfig, options: EngineOptions, device: str, prompts: Sequence[Prompt], there: Path, n: int
) -> int:
    """On a rank: prefill all prompts for the other job; return the number of blocks that are still held."""
    engine, meeting = make_engine(directory, dcp, options, device), Meeting(there)
    link(engine, directory, meeting, "prefill", "decode", n)
    for number, (token_ids, params) in enumerate(prompts):
        engine.add(token_ids, params, request_id=number, handoff=str(number))
    is_done = False
    while engine.has_requests or engine.has_transfers or not is_done:
        if dist.get_rank() == 0 and meeting.has("done"):
            engine.post(News(b"done"))
        events = engine.step()
        is_done = is_done or bool(events.news.content)
        time.sleep(0 if engine.has_requests else 0.01)
        for request in events.finished if dist.get_rank() == 0 else ():
            first = {"id": request.request_id, "token": request.token_ids[0], "logprobs": request.logprobs}
            meeting.put(f"first{request.request_id}", json.dumps(first).encode())
    engine.close()
    return engine.allocator.num_blocks - engine.allocator.num_free


def decode(
    directory: Path, dcp: DCPConfig, options: EngineOptions, device: str, prompts: Sequence[Prompt], there: Path, n: int
) -> Decoded:
    """On a rank: decode all prompts."""
    engine, meeting = make_engine(directory, dcp, options, device), Meeting(there)
    link(engine, directory, meeting, "decode", "prefill", n)
    requests = [engine.add(ids, params, request_id=number) for number, (ids, params) in enumerate(prompts)]
    drafts = record_drafts(engine.speculation.drafter)
    awaited: set[str] = set()
    while engine.has_requests or engine.has_transfers:
        for name in sorted(awaited) if dist.get_rank() == 0 else ():
            if meeting.has(name):
                awaited.remove(name)
                engine.post(News(meeting.get(name) + b"\n"))
        events = engine.step()
        for line in events.news.content.splitlines():
            first = json.loads(line)
            logprobs = [TokenLogprobs(*each[:2], tuple(map(tuple, each[2]))) for each in first["logprobs"]]
            engine.take_first(requests[first["id"]], first["token"], *logprobs)
        for request in events.wanted:
            engine.handoffs.pull(request, "prefill", str(request.request_id))
            awaited.add(f"first{request.request_id}")
    if dist.get_rank() == 0:
        meeting.put("done", b"")
    engine.close()
    assert engine.allocator.num_free == engine.allocator.num_blocks
    answers = [Answer(request.token_ids, request.logprobs) for request in requests]
    return Decoded(answers, engine.stats.num_prefill_tokens, engine.handoffs.received, drafts)


def known_tokens(request: Any, previous: Any) -> list[int]:
    """Return a request's tokens, those under way in the previous step among them."""
    tokens: list[int] = request.tokens(0, request.num_known_tokens)
    if request.num_in_flight:
        row = previous.rows[request]
        num_accepted = 0 if previous.verified is None else int(previous.verified.num_accepted[row])
        start = previous.starts[row]
        tokens += previous.message.tokens[start : start + 1 + num_accepted].tolist()
    return tokens


def record_drafts(drafter: Any) -> list[tuple[list[int], list[int]]]:
    """Let a drafter draft in every step; return a list that grows with its drafts."""
    recorded: list[tuple[list[int], list[int]]] = []
    draft, drafter.drafts_always = drafter.draft, True

    def record(wanted: Any, previous: Any) -> Any:
        drafts = draft(wanted, previous)
        flat = drafts.token_ids.tolist()
        for (request, _), num in zip(wanted, drafts.nums, strict=False):  # without a drafter there are none
            if num:
                recorded.append((known_tokens(request, previous), flat[:num]))
            flat = flat[num:]
        return drafts

    drafter.draft = record
    return recorded


def run_jobs(
    directory: Path,
    prefills: DCPConfig,
    decodes: DCPConfig,
    prompts: Sequence[Prompt],
    there: Path,
    device: str = "cpu",
    **options: Any,
) -> tuple[list[int], list[Decoded]]:
    """Run both jobs; return the results of `prefill` and of `decode` on all ranks."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "kv_cache_memory_bytes": 1 << 25}
    chosen = EngineOptions(dtype="float32", **limits | options)
    jobs: list[tuple[Callable[..., Any], DCPConfig, DCPConfig]] = [
        (prefill, prefills, decodes),
        (decode, decodes, prefills),
    ]
    with ThreadPoolExecutor(2) as pool:
        futures = []
        for function, own, other in jobs:
            sizes = own.tensor_parallel_size, other.tensor_parallel_size
            arguments = directory, own, chosen, device, prompts, there, sizes[1]
            futures.append(pool.submit(run_ranks, sizes[0], function, *arguments, device=device, timeout=300))
        errors = []
        for future in as_completed(futures):
            errors.append(future.exception())
            if errors[-1] is not None:  # the other job would wait for it
                Meeting(there).put("failed", b"")
    for error in errors:
        if error is not None:
            raise error
    return futures[0].result(), futures[1].result()
