"""The warm-up: requests of every kind, served before the first real one, so that no request waits for compilation."""

import random

from tqdm import tqdm

from dcpmla.runtime.engine import Engine
from dcpmla.runtime.graph_sizes import warm_up_sizes
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.speculation import Speculation

# Few tokens, for absorbed attention, and not a multiple of a width that it cuts requests to, so that pieces differ.
_TURN_TOKENS, _DOCUMENT_TOKENS = 33, 4096
_FEW_TOKENS = 3  # Queries of few tokens come to the document's entries (DeepSeek-V4).
_PREFILL, _GREEDY = (SamplingParams(max_new_tokens=num, ignore_eos=True) for num in (1, 8))
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
    """Serve prompts of all sizes alone, then more at once than a step takes, then prompts with all sampling parameters,
    then turns after one document, in all numbers. Collective over the TP group.

    Its blocks have arbitrary tokens, so real requests need another engine over the same cache. The first rank shows a
    progress bar if it has a terminal.
    """
    room = min(engine.max_model_len, engine.allocator.num_blocks * engine.allocator.block_tokens)
    longest = room - _GREEDY.max_new_tokens
    if longest < 1:
        return
    engine.speculation = Speculation(engine.speculation.drafter, drafts_always=True)
    disable = None if engine.mesh.tp_rank == 0 else True
    for prompts, params in tqdm(_rounds(engine, longest), desc="warming up", unit="round", disable=disable):
        for prompt in prompts:
            engine.add(prompt, params)
        for _ in engine.run():
            pass


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
    if engine.scheduler.reuse.is_enabled:
        turns = [min(length, longest // 2) for length in (_TURN_TOKENS, _FEW_TOKENS)]
        document = rng.choices(vocabulary, k=min(_DOCUMENT_TOKENS, longest - turns[0]))
        for turn in turns:
            for count in warm_up_sizes(min(engine.scheduler.max_num_seqs, max(1, budget // turn))) if turn else ():
                rounds.append(([document + rng.choices(vocabulary, k=turn) for _ in range(count)], _PREFILL))
    return rounds
