"""A batch: the requests of a step that the scheduler chose, and the number of tokens to compute for each."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from dcpmla.runtime.costs import PieceCosts
from dcpmla.runtime.request import Request

MAX_SCORED = 256  # limit of a step's prompt tokens with logits, each a row of the vocabulary in float32


class Piece(NamedTuple):
    """A request's part of a step.

    Attributes:
        num_tokens: Number of tokens to compute, including drafts.
        num_drafts: Number of drafts to verify, the last tokens.
    """

    request: Request
    num_tokens: int
    num_drafts: int = 0

    @property
    def is_decode(self) -> bool:
        """Return whether it has one token and its drafts, and attends with absorbed queries. It is valid before the
        step is launched.
        """
        is_prompt = self.request.has_forms and self.request.is_in_prompt
        return self.num_tokens - self.num_drafts == 1 and not is_prompt


@dataclass
class Batch:
    """The requests of a step, and the number of tokens to compute for each; pieces of one token and its drafts first.

    Attributes:
        budget: Further tokens that the step has room for.
        room_us: Microseconds that further pieces of prompts may take (`PieceCosts.piece_us`).
        copies: States to copy before it, (source, target), in this order.
        loads: Requests whose blocks or states are to be loaded from host memory (`Request.loading`).
        arrivals: Requests whose prompts another job prefills, from now on.
        num_scored: Tokens of prompts whose log probabilities are computed.
        num_absorbed: Number of pieces, the first ones, that attend with absorbed queries: until `arrange`, of decodes.
        num_tokens: Number of tokens to compute.
        num_drafts: Number of drafts among them.
    """

    budget: int
    room_us: float = math.inf
    pieces: list[Piece] = field(default_factory=list, init=False)
    copies: list[tuple[int, int]] = field(default_factory=list)
    loads: list[Request] = field(default_factory=list)
    arrivals: list[Request] = field(default_factory=list)
    num_scored: int = 0
    num_absorbed: int = 0
    num_tokens: int = 0
    num_drafts: int = 0

    def room(self, request: Request) -> int:
        """Return the number of a request's tokens that fit."""
        if not request.is_scored:
            return self.budget
        return min(self.budget, MAX_SCORED - self.num_scored)

    def add(self, request: Request, num_tokens: int) -> None:
        """Add a request's tokens to the step, which must have room for them."""
        if request.is_scored:
            self.num_scored += num_tokens
        self.pieces.append(Piece(request, num_tokens))
        self.num_tokens += num_tokens
        self.budget -= num_tokens

    def advance(self) -> None:
        """Count the tokens of a launched batch, except drafts, as computed, and tokens of prompts as scored."""
        for request, num_tokens, num_drafts in self.pieces:
            request.num_computed_tokens += num_tokens - num_drafts
        for request, *_ in self.pieces if self.num_scored else ():
            if request.is_scored:
                last = len(request.prompt_token_ids) - 1
                request.num_scored_tokens = max(request.num_scored_tokens, min(request.num_computed_tokens, last))

    def arrange(self, costs: PieceCosts, max_absorbed_tokens: int = 0) -> None:
        """Order the pieces: decodes, then other pieces with absorbed queries, then pieces that attend by MHA.

        Args:
            costs: Costs that choose the pieces of prompts that attend with absorbed queries, except for requests whose
                tokens have forms (`Request.has_forms`).
            max_absorbed_tokens: Tokens of the largest step that is one graph, if all its pieces are absorbed.
        """
        others = self.pieces[self.num_absorbed :]
        if not others:
            return
        decodes = self.pieces[: self.num_absorbed] + [piece for piece in others if piece.is_decode]
        prompts = [piece for piece in others if not piece.is_decode]
        sizes = [(piece.num_tokens, piece.request.num_computed_tokens) for piece in prompts]
        if any(piece.request.has_forms for piece in prompts):
            chosen = [not piece.request.is_in_prompt for piece in prompts]
        elif sizes and self.num_tokens <= max_absorbed_tokens and costs.absorbs_all(sizes):
            chosen = [True] * len(sizes)
        else:
            chosen = costs.choose_absorbed(sizes)
        absorbed = [piece for piece, is_absorbed in zip(prompts, chosen, strict=True) if is_absorbed]
        by_mha = [piece for piece, is_absorbed in zip(prompts, chosen, strict=True) if not is_absorbed]
        self.pieces = decodes + absorbed + by_mha
        self.num_absorbed = len(decodes) + len(absorbed)

    @property
    def has_single_tokens(self) -> bool:
        """Return whether each piece has one token and its drafts."""
        return self.num_tokens - self.num_drafts == len(self.pieces)

    @cached_property
    def has_prompts(self) -> bool:
        """Return whether any of its tokens is a prompt's. It is valid once the pieces are arranged."""
        are_decodes = self.has_single_tokens and self.num_absorbed == len(self.pieces)
        return not are_decodes or any(not piece.request.num_new_tokens for piece in self.pieces)

    @property
    def most_drafts(self) -> int:
        """Return the largest number of drafts of a request."""
        return max(piece.num_drafts for piece in self.pieces) if self.num_drafts else 0

    @property
    def has_long_absorbed(self) -> bool:
        """Return whether a piece with absorbed queries is longer than any decode with its drafts."""
        absorbed = () if self.has_single_tokens else self.pieces[: self.num_absorbed]
        return max((piece.num_tokens for piece in absorbed), default=0) > self.most_drafts + 1

    def describe(self, number: int, graph_size: object) -> str:
        """Return a description of the step for logs; graph_size is None for a step without a graph."""
        of_drafts = f", {self.num_drafts} of them drafts" if self.num_drafts else ""
        as_graph = "" if graph_size is None else f"; graph of {graph_size}"
        counts = f"{len(self.pieces)} requests, {self.num_tokens} tokens{of_drafts}{as_graph}"
        return f"{'prefill' if self.has_prompts else 'decode'} step {number} ({counts})"

    def goes_on(self, requests: Iterable[Request]) -> bool:
        """Return whether each of these requests, in order, has one token in the step, and all have equally many
        drafts. Most steps are so.
        """
        is_even = self.num_tokens == len(self.pieces) * self.pieces[0].num_tokens and self.has_single_tokens
        if is_even and self.num_drafts:
            is_even = len({piece.num_drafts for piece in self.pieces}) == 1
        return is_even and [piece.request for piece in self.pieces] == list(requests)

    def set_drafts(self, index: int, num_drafts: int) -> None:
        """Set the number of a decode's drafts, for which the step must have room."""
        request, num_tokens, num_before = self.pieces[index]
        num_added = num_drafts - num_before
        self.pieces[index] = Piece(request, num_tokens + num_added, num_drafts)
        self.num_tokens += num_added
        self.num_drafts += num_added
        self.budget -= num_added
