"""Predicted steps with pieces of prompts, cut and padded as the engine does it, and the waits that follow from them."""

from dataclasses import asdict, dataclass
from math import inf

from dcpmla.cli.output import Section, align
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.mixed import MixedSteps
from dcpmla.planning.prefill import PrefillCosts
from dcpmla.planning.words import ms
from dcpmla.runtime.graph_sizes import GraphSize, find_size, token_sizes
from dcpmla.runtime.pieces import PieceSizes, Room

_SIZES = (64, 512, 2048)  # pieces whose steps are printed, and one of a whole step


@dataclass(frozen=True)
class PromptStep:
    """A step with one piece of a prompt.

    Attributes:
        new, context: Number of the piece's tokens, and of tokens before them.
        num_decodes: Number of requests that decode in the step.
        graph: Size of the graphs that run the step; None if it is too large.
        step_us: Times of "total" and its parts (`MixedSteps.step_us`).
        wait_us: Time by which the step is longer than one with decodes alone; 0 without decodes.
    """

    new: int
    context: int
    num_decodes: int
    graph: GraphSize | None
    step_us: dict[str, float]
    wait_us: float


@dataclass(frozen=True)
class FirstToken:
    """The way of a prompt to its first token.

    Attributes:
        num_tokens: Number of the prompt's tokens.
        num_decodes: Number of requests that decode meanwhile.
        num_steps: Number of steps, a piece in each.
        time_us: Sum of the steps' times.
        longest_wait_us: Largest wait of the decodes in a step (`PromptStep.wait_us`).
    """

    num_tokens: int
    num_decodes: int
    num_steps: int
    time_us: float
    longest_wait_us: float


class PromptPlan:
    """Steps with pieces of prompts under one setting, alone and with a replica's share of decodes.

    Args:
        deployment: Model, and the machine that it runs on.
        batch: Number of requests that decode on the whole job.
        context: Number of tokens of each.
        max_num_batched_tokens: Limit of a step's tokens.

    Attributes:
        costs: Time of pieces of prompts.
        block_tokens: Tokens of a block, the unit of prefix reuse.
        least_state_tokens: Least tokens of a prompt that the next one reuses in a model with states
            (`PrefillCosts.least_state_tokens`); None in others.
        loads: Numbers of decodes in a step; 0 alone if decodes leave no room for prompts.
    """

    def __init__(self, deployment: Deployment, batch: int, context: int, max_num_batched_tokens: int) -> None:
        self._limit, self._context, setting = max_num_batched_tokens, context, deployment.setting
        share = setting.share(batch)
        self.loads = (0, share) if share * setting.query_len < max_num_batched_tokens else (0,)
        self._query_len = setting.query_len
        self._decode_us = deployment.step_us(share, context)["total"]
        self.costs = PrefillCosts(deployment, max_num_batched_tokens)
        self._sizes = PieceSizes(self.costs, max_num_batched_tokens)
        self._steps = {load: MixedSteps(self.costs, load, context) for load in self.loads}
        block = deployment.block()
        least = max(self.costs.least_state_tokens, block.block_tokens) if block.num_states else None
        self.block_tokens, self.least_state_tokens = block.block_tokens, least
        tokens = token_sizes(max_num_batched_tokens, self.costs.tokens_per_request, setting.dcp_config)
        self._whole, self._parted = (
            [GraphSize(num, is_whole) for num in tokens[is_whole]] for is_whole in (True, False)
        )

    def step(self, new: int, context: int, num_decodes: int) -> PromptStep:
        """Return the step with a piece of a prompt, cut to the step's tokens that the decodes leave."""
        num_decoded = num_decodes * self._query_len
        new = min(new, self._limit - num_decoded)
        num_tokens, piece = new + num_decoded, [(new, context)]
        whole = find_size(self._whole, num_tokens)
        if not (whole and self.costs.absorbs_all(piece)) and not self.costs.choose_absorbed(piece)[0]:
            whole = None
        graph = whole or find_size(self._parted, num_tokens)
        num_rows = graph.num_tokens if graph else num_tokens
        step_us = self._steps[num_decodes].step_us(new, context, num_rows, whole is not None)
        wait_us = max(0.0, step_us["total"] - self._decode_us) if num_decodes else 0.0
        return PromptStep(new, context, num_decodes, graph, step_us, wait_us)

    def pieces(self, num_tokens: int, num_decodes: int) -> list[tuple[int, int]]:
        """Return the pieces (new tokens, tokens before them) that the scheduler cuts a prompt into."""
        pieces, done, num_decoded = list[tuple[int, int]](), 0, num_decodes * self._query_len
        limit_us = self.costs.max_prefill_us if num_decodes else inf
        room = Room(num_decoded, self._limit - num_decoded, limit_us, is_first=True)
        while done < num_tokens:
            new = self._sizes.choose(done, num_tokens - done, room)
            pieces.append((new, done))
            done += new
        return pieces

    def first_token(self, num_tokens: int, num_decodes: int) -> FirstToken:
        """Return the way of a prompt to its first token."""
        steps = [self.step(*piece, num_decodes) for piece in self.pieces(num_tokens, num_decodes)]
        time_us, longest_us = sum(step.step_us["total"] for step in steps), max(step.wait_us for step in steps)
        return FirstToken(num_tokens, num_decodes, len(steps), time_us, longest_us)

    def steps(self) -> list[list[PromptStep]]:
        """Return steps with pieces of several sizes at a prompt's start and after a context, one of each load."""
        sizes = [*(size for size in _SIZES if size < self._limit), self._limit]
        return [
            [self.step(size, context, load) for load in self.loads] for context in (0, self._context) for size in sizes
        ]

    def section(self, num_tokens: int) -> Section:
        """Return all predictions; `num_tokens` is the length of the prompt."""
        rows, first_tokens = self.steps(), [self.first_token(num_tokens, load) for load in self.loads]
        content = {
            "steps": [asdict(step) | {"graph": step.graph and step.graph._asdict()} for row in rows for step in row],
            "first_token": [asdict(way) for way in first_tokens],
            "reuse": {name: getattr(self, name) for name in ("block_tokens", "least_state_tokens")},
        }
        alone, *loaded = first_tokens
        decodes = f", alone and with {self.loads[-1]:,} decodes of {self._context:,} tokens" if loaded else ""
        title = f"steps of {self.costs.deployment.setting} with a piece of a prompt{decodes}"
        lines = [title, *align([_cells(row) for row in rows])]
        if not loaded:
            lines.append(f"decodes leave no room for prompts in a step of {self._limit:,} tokens")
        line = f"a prompt of {num_tokens:,} tokens takes {ms(alone.time_us)} ms to its first token"
        for load in loaded:
            line += f"; with {load.num_decodes:,} decodes {ms(load.time_us)} ms in {load.num_steps:,} steps"
            line += f", each at most {ms(load.longest_wait_us)} ms longer than with decodes alone"
        reuse = f"prompts that begin alike reuse blocks of {self.block_tokens:,} tokens"
        if self.least_state_tokens is not None:
            reuse += f": the second a power of two blocks of at least {self.least_state_tokens:,} tokens, others all"
        return Section(content, [*lines, line, reuse])


def _cells(steps: list[PromptStep]) -> dict[str, str]:
    """Return a line of the table: a piece alone, then with decodes."""
    alone, *loaded = steps
    cells = {
        "prompt tokens": f"{alone.new:,}",
        "after": f"{alone.context:,}",
        "graph": _graph(alone),
        "step ms": ms(alone.step_us["total"]),
    }
    for step in loaded:
        cells |= {"graph with decodes": _graph(step), "with decodes ms": ms(step.step_us["total"])}
        cells["decodes wait ms"] = ms(step.wait_us)
    return cells


def _graph(step: PromptStep) -> str:
    if step.graph is None:
        return "none"
    return f"{step.graph.num_tokens:,}{' absorbed' if step.graph.is_whole else ''}"
