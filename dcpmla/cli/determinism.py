"""Prompts served in many ways, in all layouts of the cache, whose logits must be equal bit by bit (`doctor
--determinism`).
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.bench.geometries import config_of
from dcpmla.cache.blocks import BlockAllocator
from dcpmla.cli.self_tests import SelfTest
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCP_COMM_BACKENDS, DCPConfig
from dcpmla.fields import divisors
from dcpmla.integrations.arguments import layout
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.open_model import check_layout, open_model
from dcpmla.job.bootstrap import agree
from dcpmla.job.join import Job
from dcpmla.llm import build_engine
from dcpmla.ownership import NUM_TILE_LANES
from dcpmla.parallel.mesh import init_mesh
from dcpmla.runtime.batch import Batch
from dcpmla.runtime.drafts import Drafter, Drafts
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.in_flight import InFlightStep
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.scheduler import Scheduler

# Prompts around borders of tiles, and answers that cross one: 512 is a border of blocks for all DCP sizes.
PROMPT_LENS = (1, 2, 63, 64, 65, 130, 509, 700)
CPU_PROMPT_LENS = (1, 63, 65, 130)  # fewer, because a CPU multiplies each row apart
_NUM_NEW = 8
_MOST_OTHER_TOKENS = 24  # Tokens of the longest prompt that is not compared.
_NUM_DRAFTS = 3
_PREEMPTION_PERIOD = 5  # steps
_MOST_PREEMPTED = 2  # times of a request
_WRONG_PERIOD = 4  # Every fourth draft is wrong.
MAX_NUM_SEQS = 64
_MAX_MODEL_LEN = 1024
# A model with the attention of DeepSeek-V3, and less of everything else.
_SIZES = {
    **{"hidden_size": 2048, "intermediate_size": 4096, "moe_intermediate_size": 512, "num_hidden_layers": 4},
    **{"n_routed_experts": 32, "first_k_dense_replace": 1, "vocab_size": 8192, "num_nextn_predict_layers": 0},
}


class Answer(NamedTuple):
    """New tokens, and the logits [n, vocab] float32 that each was chosen from."""

    token_ids: list[int]
    logits: Tensor

    def count_equal(self, other: "Answer") -> int:
        """Return the number of tokens that are equal in both, their logits bit by bit."""
        rows = zip(self.token_ids, other.token_ids, self.logits, other.logits, strict=False)
        return sum(token == its and torch.equal(row, its_row) for token, its, row, its_row in rows)


@dataclass(frozen=True)
class Way:
    """A way to serve prompts.

    Attributes:
        name: Words on it.
        max_num_batched_tokens: Limit of a step's tokens.
        max_num_seqs: Limit of requests that run at the same time.
        num_others: Number of other prompts among them.
        is_again: Whether the prompts were served before, so that their blocks are found.
        is_preempted: Whether a running request is preempted every few steps.
        has_drafts: Whether steps verify drafts; most drafts are right.
        has_graphs: Whether steps run as CUDA graphs.
    """

    name: str
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = MAX_NUM_SEQS
    num_others: int = 0
    is_again: bool = False
    is_preempted: bool = False
    has_drafts: bool = False
    has_graphs: bool = False


ALONE = Way("one by one", max_num_seqs=1)
WAYS = (
    Way("together"),
    Way("among 56 others", num_others=56),
    Way("in chunks of 7 tokens", max_num_batched_tokens=7),
    Way("in chunks of 64 tokens", max_num_batched_tokens=64),
    Way("in chunks of 1,000 tokens, among 20 others", max_num_batched_tokens=1000, num_others=20),
    Way("with blocks of earlier requests", is_again=True),
    Way("with preemptions", max_num_batched_tokens=100, is_preempted=True),
    Way("with preemptions, earlier blocks and drafts", 300, is_again=True, is_preempted=True, has_drafts=True),
    Way("with drafts", has_drafts=True),
)
GRAPH_WAYS = (
    Way("in graphs, one by one", max_num_seqs=1, has_graphs=True),
    Way("in graphs, among 20 others", num_others=20, has_graphs=True),
    Way("in graphs, in chunks of 64 tokens", max_num_batched_tokens=64, has_graphs=True),
    Way("in graphs, with preemptions", 100, is_preempted=True, has_graphs=True),
)


def bit_tests(job: Job, model: str | None, dtype: torch.dtype) -> Iterator[SelfTest]:
    """Yield the test of each layout and way: whether all logits are equal to the logits of prompts served one by
    one with DCP 1. Collective over the job.

    Args:
        model: Directory or hub id; None for a small model of random weights in a dtype.
    Raises:
        ValueError: The model does not exist, or does not support the mode.
    """
    expected: list[Answer] = []
    with TemporaryDirectory() as folder:
        with agree():
            files = open_model(model or _save_config(Path(folder), job.ranks.device))
            files = replace(files, max_model_len=min(files.max_model_len, _MAX_MODEL_LEN))
        options = EngineOptions(
            dtype="auto" if model else dtype,
            load_format="auto" if model else "dummy",
            max_num_batched_tokens=1000,
            max_num_seqs=MAX_NUM_SEQS,
        )
        for dcp in _layouts(job):
            check_layout(files, dcp)
            seq_lens = [files.max_model_len + dcp.virtual_block_size] * MAX_NUM_SEQS
            loaded, chosen = build_engine(job, dcp, files, options, seq_lens)
            name = f"dcp {dcp.decode_context_parallel_size}, exchange {chosen.exchange.name}"
            with closing(loaded):
                lengths = PROMPT_LENS if job.ranks.device.type == "cuda" else CPU_PROMPT_LENS
                cases = draw_cases(loaded.model.vocab_size, files.max_model_len, lengths)
                has_graphs = loaded.graph is not None
                for way in (ALONE, *WAYS, *(GRAPH_WAYS if has_graphs else ())):
                    answers = serve(loaded, way, cases, expected)
                    expected = expected or answers
                    yield _compare(f"equal bits, {name}, {way.name}", answers, expected)


def _compare(name: str, answers: list[Answer], expected: list[Answer]) -> SelfTest:
    num_equal = sum(answer.count_equal(right) for answer, right in zip(answers, expected, strict=True))
    total = sum(len(right.logits) for right in expected)
    words = f"{num_equal} of {total} rows of logits are equal"
    if num_equal == total:
        return SelfTest(name, 0.0, "", words)
    pairs = [(answer.logits, right.logits) for answer, right in zip(answers, expected, strict=True)]
    return SelfTest(name, max(float((first - second).abs().max()) for first, second in pairs), words)


def _layouts(job: Job) -> Iterator[DCPConfig]:
    """Yield the layouts of the mode, with each exchange that is possible here."""
    num_ranks, device = job.ranks.num_ranks, job.ranks.device
    for dcp_size in divisors(NUM_TILE_LANES):
        if num_ranks % dcp_size:
            continue
        group = init_mesh(num_ranks, dcp_size).dcp_group
        for backend in DCP_COMM_BACKENDS[1:] if dcp_size > 1 else DCP_COMM_BACKENDS[:1]:
            dcp = layout({"deterministic": True, "dcp_comm_backend": backend}, num_ranks, dcp_size)
            try:
                select_exchange(dcp, group, device)
            except ValueError:  # `doctor` has printed why
                continue
            yield dcp


def _save_config(folder: Path, device: torch.device) -> str:
    """Save the config of the small model; a tiny one for CPUs."""
    is_gpu = device.type == "cuda"
    sizes = {**(_SIZES if is_gpu else {}), "max_position_embeddings": _MAX_MODEL_LEN, "torch_dtype": "bfloat16"}
    config_of("deepseek-v3" if is_gpu else "tiny", **sizes).save_pretrained(folder)
    return str(folder)


class Case(NamedTuple):
    """A prompt and its parameters."""

    token_ids: list[int]
    params: SamplingParams


def draw_cases(vocab_size: int, max_model_len: int, lengths: Sequence[int] = PROMPT_LENS) -> list[Case]:
    """Return random prompts, whose tokens are the best ones and drawn ones in turn."""
    rng, cases = random.Random(0), []
    for index, length in enumerate(lengths):
        prompt = rng.choices(range(vocab_size), k=min(length, max_model_len - _NUM_NEW))
        temperature = 0.8 if index % 2 else 0.0
        params = SamplingParams(max_new_tokens=_NUM_NEW, ignore_eos=True, temperature=temperature, seed=index)
        cases.append(Case(prompt, params))
    return cases


def serve(loaded: Engine, way: Way, cases: Sequence[Case], known: Sequence[Answer] = ()) -> list[Answer]:
    """Serve prompts in a way, with the model and the cache of an engine. Collective over the TP group.

    Args:
        known: Answers in another way, from which drafts are taken; needed with drafts.
    """
    engine = _engine(loaded, way, {index: answer.token_ids for index, answer in enumerate(known)})
    rng, vocabulary = random.Random(1), range(loaded.model.vocab_size)
    fillers = [rng.choices(vocabulary, k=rng.randint(1, _MOST_OTHER_TOKENS)) for _ in range(way.num_others)]
    requests: list[Request] = []
    for _ in range(1 + way.is_again):
        requests = []
        for index, (token_ids, params) in enumerate(cases):
            requests.append(engine.add(token_ids, params, request_id=index, keep_logits=True))
            for prompt in fillers[index :: len(cases)]:
                engine.add(prompt, SamplingParams(max_new_tokens=_NUM_NEW, ignore_eos=True), request_id="other")
        for _ in engine.run():
            pass
    return [Answer(request.token_ids, torch.stack(request.logits)) for request in requests]


def _engine(loaded: Engine, way: Way, known: Mapping[str | int, Sequence[int]]) -> Engine:
    scheduler = (_Preempting if way.is_preempted else Scheduler)(
        BlockAllocator.of(loaded.cache.sizes),
        way.max_num_batched_tokens,
        way.max_num_seqs,
        enable_prefix_caching=way.is_again,
        costs=loaded.scheduler.costs,
    )
    return Engine(
        loaded.model,
        loaded.cache,
        loaded.dcp,
        loaded.mesh,
        scheduler,
        loaded.max_model_len,
        on_step=loaded.on_step,
        graph=loaded.graph if way.has_graphs else None,
        mixed_graph=loaded.mixed_graph if way.has_graphs else None,
        drafter=_KnownAnswers(known) if way.has_drafts else None,
    )


class _Preempting(Scheduler):
    """A scheduler that preempts a running request every few steps."""

    _num_steps = 0

    def schedule(self, now: float, num_drafts: int = 0, agreed_now: float = 0.0) -> Batch:
        """Return the next step, maybe without a request that ran in the one before."""
        self._num_steps += 1
        started = [each for each in self.running if each.num_computed_tokens and each.num_preemptions < _MOST_PREEMPTED]
        if started and self._num_steps % _PREEMPTION_PERIOD == 0:
            victim = started[self._num_steps // _PREEMPTION_PERIOD % len(started)]
            victim.num_preemptions += 1
            self.put_back(victim)
        return super().schedule(now, num_drafts, agreed_now)


class _KnownAnswers(Drafter):
    """Drafts from known answers. Every fourth draft is wrong.

    Args:
        known: Tokens of the answers by request ids.
    """

    drafts_always = True

    def __init__(self, known: Mapping[str | int, Sequence[int]]) -> None:
        super().__init__(_NUM_DRAFTS)
        self._known = known

    def candidates(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return the requests whose answers are known."""
        return [request for request in requests if request.request_id in self._known]

    def draft(self, wanted: Sequence[tuple[Request, int]], previous: InFlightStep | None) -> Drafts:
        """Return the known next tokens."""
        return Drafts.of([list(self._next(request, num)) for request, num in wanted])

    def _next(self, request: Request, num_drafts: int) -> Iterator[int]:
        start = len(request.token_ids)
        for index, token in enumerate(self._known.get(request.request_id, ())[start : start + num_drafts], start):
            yield token if index % _WRONG_PERIOD else 1 - min(token, 1)
