"""Steps for a warm-up and a benchmark, which no client has asked for."""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dcpmla.runtime.batch import Batch
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.graph_sizes import warm_up_sizes
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import SamplingParams


class Made(NamedTuple):
    """A request of a step: its cached and its new tokens, drafts among the new ones."""

    num_cached: int
    num_new: int
    num_drafts: int = 0


# New tokens of pieces after a context: few, some that absorbed attention cuts into pieces of several lengths, more.
_PIECES = (2, 3, 17, 33, 64, 129, 257, 1025, 1537)
# Lengths and numbers of pieces beside a decode and a prompt that fills the step.
_MIXED = ((2, 1), (64, 1), (33, 8), (257, 1))
_DOCUMENT_TOKENS = 4096
_MOST_CACHED = 1 << 20  # tokens of a step's requests, whose numbers the host makes


def made_steps(engine: Engine) -> Iterator[list[Made]]:
    """Yield the requests of steps of all kinds: decodes, drafts and pieces of prompts, in all numbers, after contexts
    of all lengths, alone and beside prompts.
    """
    budget, most, room = engine.scheduler.max_num_batched_tokens, engine.scheduler.max_num_seqs, engine.max_model_len
    for seq_len in sorted({room, *(1 << exponent for exponent in range(room.bit_length()))}):
        decode, lengths = Made(seq_len - 1, 1), [length for length in _PIECES if length < min(seq_len, budget)]
        yield from ([decode] * count for count in sorted({1, min(most, budget, max(1, _MOST_CACHED // seq_len))}))
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
        tokens = [1 + index % 2] * (num_cached + num_new - num_drafts)
        request = Request(tokens, SamplingParams(ignore_eos=True), has_forms=has_forms)
        blocks = -(-(num_cached + num_new) // sizes.block_tokens)
        request.block_ids = array("q", ((index * blocks + block) % sizes.num_blocks for block in range(blocks)))
        request.num_computed_tokens, request.state = num_cached, index if sizes.num_states else None
        batch.add(request, num_new)
        batch.pieces[-1] = batch.pieces[-1]._replace(num_drafts=num_drafts)
        batch.num_drafts += num_drafts
    return batch
