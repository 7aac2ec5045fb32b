"""The warm-up: requests of every kind, served before the first real one, so that no request waits for compilation."""

import logging
import random
from collections.abc import Callable, Iterable, Sized
from contextlib import nullcontext
from functools import partial

import torch
from tqdm import tqdm

from dcpmla.parallel.collectives import is_failed_collective
from dcpmla.runtime.capture import error_on_host_sync
from dcpmla.runtime.choice_memory import ALL_CHANGES
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.graph_sizes import warm_up_sizes
from dcpmla.runtime.made_steps import Made, made_batch, made_steps
from dcpmla.runtime.runner import StepRunner
from dcpmla.runtime.sampling import SamplingParams
from dcpmla.runtime.speculation import Speculation

_log = logging.getLogger(__name__)
_PREFILL, _DRAFTED, _GREEDY = (SamplingParams(max_new_tokens=num, ignore_eos=True) for num in (1, 3, 8))
_SCORED, _SCORED_TOKENS = SamplingParams(max_new_tokens=1, ignore_eos=True, prompt_logprobs=0), 1024


def rehearse(engine: Engine, graphs: Iterable[StepGraph], launched: Sized) -> list[list[Made]]:
    """Run steps of all kinds; return those that are the first to launch some kernel. Collective over the TP group.

    A step that reads results on the host cannot be rehearsed, because no kernel writes them. All steps are
    returned then.

    Args:
        engine: Engine over any cache, even of one block.
        graphs: Graphs that are not captured, whose sizes come first.
        launched: Kernels so far (`compilations.rehearsal`).
    """
    run, new = _step_of(engine), []
    try:
        with error_on_host_sync() if engine.model.device.type == "cuda" else nullcontext():
            for graph in graphs:
                graph.rehearse()
            for step in made_steps(engine):
                num_launched = len(launched)
                run(step)
                if len(launched) > num_launched:
                    new.append(step)
    except RuntimeError as error:
        if is_failed_collective(error):
            raise
        _log.info("kernels are compiled one after the other: %s", error)
        return [*made_steps(engine)]
    return new


def warm_up(engine: Engine, steps: Iterable[list[Made]]) -> None:
    """Serve prompts of all sizes alone, then more at once than a step takes, then prompts with all sampling parameters;
    then compute steps which no request had. Collective over the TP group.

    Its blocks have arbitrary tokens, so real requests need another engine over the same cache. The first rank shows a
    progress bar if it has a terminal.

    Args:
        steps: Steps that need kernels of their own (`rehearse`).
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
    run = _step_of(engine)
    for step in track([step for step in steps if max(made.num_cached + made.num_new for made in step) <= room]):
        run(step)


def _step_of(engine: Engine) -> Callable[[list[Made]], None]:
    """Return the function that computes a step, and what a drafter computes over it."""
    costs, drafter = engine.scheduler.costs, engine.speculation.drafter
    runner = StepRunner(engine.model, engine.cache, engine.dcp, engine.mesh.dcp_rank, costs, engine.grammars)

    def run(step: list[Made]) -> None:
        batch = made_batch(engine, step)
        batch.arrange(costs, engine.scheduler.max_absorbed_tokens)
        drafts = torch.zeros(batch.num_drafts, dtype=torch.int64, device=engine.model.device)
        graph = runner.graph_of(batch, engine.graph, engine.mixed_graph)
        drafter.follow(runner.start(batch, None, drafts if batch.num_drafts else None, graph, 0.0).by)

    return run


def _rounds(engine: Engine, longest: int) -> list[tuple[list[list[int]], SamplingParams]]:
    """Return the prompts to serve at once, round after round, and their parameters; the same on all ranks.

    Args:
        longest: Tokens of the longest prompt.
    """
    budget, rng, vocabulary = engine.scheduler.max_num_batched_tokens, random.Random(0), range(engine.model.vocab_size)
    rounds = [([rng.choices(vocabulary, k=size)], _PREFILL) for size in warm_up_sizes(min(longest, budget))]
    size = min(longest, budget + budget // 2)
    prompts = [rng.choices(vocabulary, k=size) for _ in range(budget // size + 2)]
    rounds += [(prompts, _GREEDY), ([prompt[:64] for prompt in prompts], ALL_CHANGES)]
    if engine.dcp.deterministic:  # the head has a tile for each number of rows, and prompts' logprobs many rows
        sizes = warm_up_sizes(min(longest, budget, _SCORED_TOKENS))
        rounds += [([rng.choices(vocabulary, k=size)], _SCORED) for size in sizes]
    if engine.speculation.drafter.num_speculative_tokens:
        counts = warm_up_sizes(min(engine.scheduler.max_num_seqs, budget, engine.allocator.num_blocks // 2))
        rounds += [([[0]] * count, _DRAFTED) for count in counts]
    return rounds
