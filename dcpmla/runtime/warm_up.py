"""The warm-up: requests of every kind, served before the first real one, so that no request waits for compilation."""

import random
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from tqdm import tqdm

from dcpmla.runtime.batch import Batch
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.graph_sizes import warm_up_sizes
from dcpmla.runtime.request import Request
from dcpmla.runtime.runner import StepRunner
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.speculation import Speculation


class Made(NamedTuple):
    """A request of a step that nobody has asked for: its cached and its new tokens, drafts among the new ones."""

    num_cached: int
    num_new: int
    num_drafts: int = 0


# New tokens of pieces after a context: few, some that absorbed attention cuts into pieces of several lengths, more.
_PIECES = (3, 17, 33, 64, 129, 257, 1025, 1537)
# Lengths and numbers of pieces beside a decode and a prompt that fills the step.
_MIXED = ((2, 1), (64, 1), (33, 8), (257, 1))
_DOCUMENT_TOKENS = 4096
_PREFILL, _DRAFTED, _GREEDY = (SamplingParams(max_new_tokens=num, ignore_eos=True) for num in (1, 3, 8))
_DRAWN = SamplingParams(
    max_new_tokens=8,
    ignore_eos=True,
    temperature=1.0,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.5,
    repetition_penalty=1.1,
    min_tokens=4,
    logit_bias={0: 1.0},
    logprobs=1,
    prompt_logprobs=1,
)


def warm_up(engine: Engine) -> None:
    """Serve prompts of all sizes alone, then more at once than a step takes, then prompts with all sampling parameters;
    then compute steps of decodes and of pieces of prompts, in all numbers and after contexts of all lengths, which no
    request had. Collective over the TP group.

    Its blocks have arbitrary tokens, so real requests need another engine over the same cache. The first rank shows a
    progress bar if it has a terminal.
    """
    room = min(engine.max_model_len, engine.allocator.num_blocks * engine.allocator.block_tokens)
    longest = room - _GREEDY.max_new_tokens
    if longest < 1:
        return
    engine.speculation = Speculation(engine.speculation.drafter, drafts_always=True)
    track = partial(tqdm, desc="warming up", disable=None if engine.mesh.tp_rank == 0 else True)
    for prompts, params in track(_rounds(engine, longest), unit="round"):
        for prompt in prompts:
            engine.add(prompt, params)
        if params is _DRAFTED:  # a prompt beside requests that try different numbers of drafts
            if len(prompts) > 1:
                engine.add(prompts[0], _GREEDY)
            engine.step()
            engine.add([0] * min(longest, 2 * engine.scheduler.max_num_batched_tokens), _PREFILL)
        for _ in engine.run():
            pass
    runner = StepRunner(
        engine.model, engine.cache, engine.dcp, engine.mesh.dcp_rank, engine.scheduler.costs, engine.grammars
    )
    for pieces in track([*_steps(engine, room)], unit="step"):
        batch = made_batch(engine, pieces)
        batch.arrange(engine.scheduler.costs, engine.scheduler.max_absorbed_tokens)
        drafts = torch.zeros(batch.num_drafts, dtype=torch.int64, device=engine.model.device)
        graph = runner.graph_of(batch, engine.graph, engine.mixed_graph)
        runner.start(batch, None, drafts if batch.num_drafts else None, graph, 0.0)


def _rounds(engine: Engine, longest: int) -> list[tuple[list[list[int]], SamplingParams]]:
    """Return the prompts to serve at once, round after round, and their parameters; the same on all ranks.

    Args:
        longest: Tokens of the longest prompt.
    """
    budget, rng, vocabulary = engine.scheduler.max_num_batched_tokens, random.Random(0), range(engine.model.vocab_size)
    rounds = [([rng.choices(vocabulary, k=size)], _PREFILL) for size in warm_up_sizes(min(longest, budget))]
    size = min(longest, budget + budget // 2)
    prompts = [rng.choices(vocabulary, k=size) for _ in range(budget // size + 2)]
    rounds += [(prompts, _GREEDY), ([prompt[:64] for prompt in prompts], _DRAWN)]
    if engine.speculation.drafter.num_speculative_tokens:
        counts = warm_up_sizes(min(engine.scheduler.max_num_seqs, budget, engine.allocator.num_blocks // 2))
        rounds += [([[0]] * count, _DRAFTED) for count in counts]
    return rounds


def _steps(engine: Engine, room: int) -> Iterator[list[Made]]:
    """Yield the requests of each step.

    Args:
        room: Tokens of the longest request.
    """
    budget, most = engine.scheduler.max_num_batched_tokens, engine.scheduler.max_num_seqs
    num_cached = engine.allocator.num_blocks * engine.allocator.block_tokens
    for seq_len in sorted({room, *(1 << exponent for exponent in range(room.bit_length()))}):
        decode, lengths = Made(seq_len - 1, 1), [length for length in _PIECES if length < min(seq_len, budget)]
        yield from ([decode] * count for count in sorted({1, min(most, budget, num_cached // seq_len)}))
        yield from ([Made(seq_len - length, length)] for length in lengths)
        for length, count in _MIXED:
            if length < seq_len and count + 2 <= most:
                yield from _beside_prompts([decode, *[Made(seq_len - length, length)] * count], seq_len, room, budget)
    seq_len = min(_DOCUMENT_TOKENS, room)
    for length in (length for length in _PIECES if length < seq_len):
        yield from ([Made(seq_len - length, length)] * count for count in warm_up_sizes(min(most, budget // length)))
    most_drafts = min(engine.speculation.drafter.num_speculative_tokens, seq_len - 1)
    for num_drafts in sorted({0, min(1, most_drafts), most_drafts}):
        tried = Made(seq_len - num_drafts - 1, num_drafts + 1, num_drafts)
        for count in warm_up_sizes(min(most, budget // (num_drafts + 1))):
            yield [tried] * count
            if count < most:
                yield from _beside_prompts([tried] * count, seq_len, room, budget)
            if num_drafts and count + 2 <= most:  # requests that try different numbers of drafts
                yield from _beside_prompts([Made(seq_len - 1, 1), *[tried] * count], seq_len, room, budget)


def _beside_prompts(requests: list[Made], context: int, room: int, budget: int) -> Iterator[list[Made]]:
    """Yield requests with a prompt that fills the step, with and without a context."""
    rest = min(budget - sum(made.num_new for made in requests), room)
    if rest > 1:
        yield [*requests, Made(0, rest)]
        yield [*requests, Made(min(context, room - rest), rest)]


def made_batch(engine: Engine, requests: Sequence[Made]) -> Batch:
    """Return a step of requests whose tokens are arbitrary, and whose blocks may be shared."""
    batch, sizes = Batch(sum(made.num_new for made in requests)), engine.cache.sizes
    for index, (num_cached, num_new, num_drafts) in enumerate(requests):
        has_forms = engine.has_forms and num_new > num_drafts + 1
        tokens = [0] * (num_cached + num_new - num_drafts)
        request = Request(tokens, SamplingParams(ignore_eos=True), has_forms=has_forms)
        blocks = -(-(num_cached + num_new) // sizes.block_tokens)
        request.block_ids = array("q", ((index * blocks + block) % sizes.num_blocks for block in range(blocks)))
        request.num_computed_tokens, request.state = num_cached, index if sizes.num_states else None
        batch.add(request, num_new)
        batch.pieces[-1] = batch.pieces[-1]._replace(num_drafts=num_drafts)
        batch.num_drafts += num_drafts
    return batch
