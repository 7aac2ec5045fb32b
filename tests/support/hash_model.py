"""A model that remembers nothing but the cache, for tests of the engine.

It writes tokens and positions into the cache, reads a request's whole sequence back through the step's metadata,
and continues it by a hash. A block handed to two requests, lost, or reused wrongly changes the tokens.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import dcpmla.runtime.agreement as agreement_module
import dcpmla.runtime.engine as engine_module
from dcpmla.attention.step.chunks import ContextChunk
from dcpmla.attention.step.metadata import StepBuilder, StepMetadata
from dcpmla.cache.host import HostMemory
from dcpmla.cache.latent import LatentCache, LatentPlan, LayerMemory
from dcpmla.cache.tier import HostTier, Tier
from dcpmla.config import DCPConfig
from dcpmla.ownership import TILE
from dcpmla.runtime.costs import TOKEN_COSTS, PieceCosts
from dcpmla.runtime.drafts import Drafter, Drafts
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.in_flight import InFlightStep
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from tests.support.engines import new_engine

VOCAB_SIZE, EOS, BLOCK = 30, 29, 4
MESH: Any = SimpleNamespace(tp_size=1, tp_rank=0, dcp_size=1, dcp_rank=0, tp_group=None)


class HashModel:
    """A model that continues a sequence by a hash of all of it, as the cache has it."""

    attention: Any = SimpleNamespace(step_builder=lambda plan, *layout: StepBuilder(*layout))
    device = torch.device("cpu")
    dtype = torch.float32
    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset([EOS])
    least_prefill = 2  # tokens: pieces of one token come first, as decodes
    reads_anything = False  # whether rows of a context need not be there: a warm-up's steps have none
    has_new_in_chunks = False  # whether chunks of context include the new tokens, where there are any

    def __init__(self) -> None:
        self.steps: list[list[int]] = []  # tokens of each piece of each step
        self.faults: list[Tensor] = []

    def hidden(self, token_ids: Tensor, metadata: StepMetadata, cache: LatentCache) -> Tensor:
        """Return the logits of all tokens."""
        logits = torch.zeros(len(token_ids), VOCAB_SIZE)
        rows, mine = cache[0].latents.view(-1, 2), metadata.tokens.slots >= 0
        rows[metadata.tokens.slots[mine]] = torch.stack([token_ids, metadata.tokens.positions], -1)[mine].float()
        if metadata.defer is not None and metadata.decode is not None:  # as layers do (`MLAAttention.attend`)
            self._compute(token_ids, cache, logits, metadata)
        metadata.run_outside_graph(self._compute, token_ids, cache, logits)
        return logits

    def logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def prepare(self, metadata: StepMetadata) -> StepMetadata:
        return metadata

    def _compute(self, token_ids: Tensor, cache: LatentCache, logits: Tensor, metadata: StepMetadata) -> None:
        token_ids, rows = token_ids[: metadata.num_tokens], cache[0].latents.view(-1, 2)
        ends = self._sequences(token_ids, metadata, rows)
        self.steps.append([num_new for _, num_new in ends.values()])
        for at, (sequence, _) in ends.items():
            if sequence:  # a token of padding sees none
                logits[at, next_token(sequence)] = 1

    def check(self) -> None:
        pass

    def decode(self, token_ids: Tensor, metadata: StepMetadata, cache: LatentCache) -> Tensor:
        """For a decode graph."""
        return self.hidden(token_ids, metadata, cache)

    def _sequences(self, token_ids: Tensor, metadata: StepMetadata, rows: Tensor) -> dict[int, tuple[list[int], int]]:
        """Row of each decode's token and of each other request's last one -> the sequence up to there, and how many
        tokens of it are new (in a decode of several, one each).
        """
        ends: dict[int, tuple[list[int], int]] = {}
        decode = metadata.decode
        if decode is not None:
            starts: Sequence[int] = range(0, metadata.num_decode_tokens + 1, decode.max_query_len)
            if decode.query_start_loc is not None:
                starts = decode.query_start_loc.tolist()
            table = decode.block_table if decode.request_index is None else decode.block_table[decode.request_index]
            for blocks, start, end in zip(table, starts, starts[1:], strict=False):
                slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
                for index in range(start, end):
                    ends[index] = self._read(rows[slots[: decode.local_seq_lens[index]]]), 1
        if metadata.prefill is not None:
            starts = metadata.prefill.queries.start
            for index, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
                assert end - start >= self.least_prefill
                new = slice(metadata.num_decode_tokens + start, metadata.num_decode_tokens + end)
                parts = [chunk_rows(chunk, rows, index) for chunk in metadata.prefill.context_chunks]
                if not (parts and self.has_new_in_chunks):
                    parts.append(torch.stack([token_ids[new], metadata.tokens.positions[new]], -1).float())
                ends[new.stop - 1] = self._read(torch.cat(parts)), end - start
        return ends

    def _read(self, rows: Tensor) -> list[int]:
        """Rows of (token, position) -> tokens; every position must be there, in order."""
        if self.reads_anything:
            return [0]
        assert rows[:, 1].tolist() == list(range(len(rows)))
        return [int(token) for token in rows[:, 0].tolist()]


def chunk_rows(chunk: ContextChunk, rows: Tensor, request: int) -> Tensor:
    return rows[chunk.local_slots][chunk.order][chunk.keys.start[request] : chunk.keys.start[request + 1]]


def next_token(sequence: Sequence[int]) -> int:
    return hashlib.sha256(bytes(sequence)).digest()[0] % VOCAB_SIZE


def alone(prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < max_new_tokens and EOS not in tokens:
        tokens.append(next_token([*prompt, *tokens]))
    return tokens


def alone_ignoring_eos(prompt: Sequence[int], num_new: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(num_new):
        tokens.append(next_token([*prompt, *tokens]))
    return tokens


def answer(engine: Engine, *prompts: Sequence[int], num_new: int = 3, **params: Any) -> list[Request]:
    """Serve prompts that come at once, and check that each request gets the tokens that it gets alone."""
    sampling = SamplingParams(max_new_tokens=num_new, **params)
    requests = [engine.add(list(prompt), sampling) for prompt in prompts]
    list(engine.run())
    for request in requests:
        expected = alone_ignoring_eos if sampling.ignore_eos else alone
        assert request.token_ids == expected(request.prompt_token_ids, num_new)
    return requests


class HashDrafter(Drafter):
    """Drafts of the hash model, each right or wrong by a random number, and as many as another one says.

    Args:
        share: of drafts that are right.
        always: every request wants all drafts that there is room for.
        ahead: it takes the tokens under way from where the device has them.
    """

    drafts_always = True
    vocab_size = VOCAB_SIZE
    next_token = staticmethod(next_token)

    def __init__(
        self, num_speculative_tokens: int, share: float, seed: int = 0, always: bool = False, ahead: bool = False
    ) -> None:
        super().__init__(num_speculative_tokens)
        self.reads_tokens = not ahead
        self.share, self.always, self.rng = share, always, random.Random(seed)

    def candidates(self, requests: Sequence[Request]) -> Sequence[Request]:
        return requests if self.always or self.rng.random() < 0.8 else []

    def draft(self, wanted: Sequence[tuple[Request, int]], previous: InFlightStep | None) -> Drafts:
        return Drafts.of([self._guess(request, num, previous) if num else [] for request, num in wanted])

    def _guess(self, request: Request, num_wanted: int, previous: InFlightStep | None) -> list[int]:
        sequence = request.tokens(0, request.num_known_tokens)
        if previous is not None and request.num_in_flight:
            assert not self.reads_tokens
            row = previous.rows[request]
            num_accepted = 0 if previous.verified is None else int(previous.verified.num_accepted[row])
            start = previous.starts[row]
            sequence += previous.message.tokens[start : start + 1 + num_accepted].tolist()
        start = len(sequence)
        for _ in range(num_wanted if self.always else self.rng.randint(0, num_wanted)):
            right = self.next_token(sequence)
            sequence.append(right if self.rng.random() < self.share else (right + 1) % self.vocab_size)
        return sequence[start:]


class Letters:
    """A tokenizer: a token is a character, except for the special one at the end."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("A") for letter in text]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids if token != EOS)


def new_cache(num_blocks: int, device: str = "cpu") -> LatentCache:
    """Return the cache of a model, with NaN in it."""
    sizes = {"num_blocks": num_blocks, "block_size": BLOCK, "layers": (LayerMemory(2),), "dcp_size": 1}
    cache = LatentCache(LatentPlan(dtype=torch.float32, **sizes), torch.device(device))
    cache[0].latents.fill_(torch.nan)
    return cache


def make_engine(
    num_blocks: int,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 16,
    max_model_len: int = 200,
    *,
    model: HashModel | None = None,
    mesh: Any = MESH,
    tokenizer: Any = None,
    with_graph: bool = False,
    drafter: Drafter | None = None,
    mixed: bool = False,
    costs: PieceCosts = TOKEN_COSTS,
    on_step: Callable[[str], object] = lambda line: None,
    num_host_blocks: int = 0,
    memory: type[HostMemory] = HostMemory,
    open_disk: Callable[[HostMemory], Tier | None] = lambda memory: None,
    deterministic: bool = False,
) -> Engine:
    cache = new_cache(num_blocks)
    alignment = 2 * TILE if deterministic else BLOCK
    workspace = alignment * max(1, max_num_seqs)
    dcp = DCPConfig(block_size=BLOCK, context_workspace_tokens=workspace, deterministic=deterministic)
    model = model or HashModel()
    graph = None
    if with_graph:
        query_len = 1 if drafter is None else 1 + drafter.num_speculative_tokens
        graph = StepGraph.decodes(
            model.decode,
            torch.tensor(0),
            cache,
            StepBuilder(dcp, mesh.dcp_rank),
            mesh,
            max_num_seqs,
            max_model_len,
            query_len,
        )
    limits = max_model_len, max_num_batched_tokens, max_num_seqs
    options: dict[str, Any] = {"tokenizer": tokenizer, "graph": graph, "drafter": drafter, "on_step": on_step}
    if mixed:
        sizes = max_num_batched_tokens, max_num_seqs, max_model_len, costs.tokens_per_request
        options["mixed_graph"] = StepGraph.prompts(model, cache, StepBuilder(dcp, mesh.dcp_rank), mesh, *sizes)
    if num_host_blocks:
        host = memory(cache)
        host.allocate(num_host_blocks, 0)
        options["tier"] = host, HostTier(num_host_blocks, disk=open_disk(host))
    return new_engine(model, cache, dcp, mesh, *limits, costs=costs, **options)


def drive(engine: Engine, on_token: Callable[[Request, str], object]) -> list[Request]:
    """Step until no request is left, and call a function with each request's new text; return the finished ones."""
    finished: list[Request] = []
    lengths: dict[Request, int] = {}
    while engine.has_requests:
        events = engine.step()
        for request, text in [(request, request.text) for request in events.changed]:
            start, lengths[request] = lengths.get(request, 0), len(text)
            on_token(request, text[start:])
        finished += events.finished
    return finished


class Clock:
    """Goes on by a second with each look at it, and by what is slept; an engine that is made after it begins at 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = -1.0
        clock = SimpleNamespace(monotonic=self.look, perf_counter=self.look_on, sleep=self.sleep)
        for module in (engine_module, agreement_module):
            monkeypatch.setattr(module, "time", clock)

    def look(self) -> float:
        self.now += 1
        return self.now

    def look_on(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
