"""Drafts: guesses of a request's next tokens, which a step verifies all at once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.parallel.collectives import named
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.acceptance import Compared
from dcpmla.runtime.request import Request

if TYPE_CHECKING:
    from dcpmla.attention.step.metadata import StepMetadata
    from dcpmla.runtime.graph import StepGraph
    from dcpmla.runtime.in_flight import InFlightStep

NO_DRAFT = -1  # replaces a missing draft: the model computes token 0, and it is rejected


class Drafts(NamedTuple):
    """Drafts of a step's decodes.

    Attributes:
        nums: Number of drafts of each request.
        token_ids: [sum of nums] int64, request after request, possibly `NO_DRAFT`; on the CPU if the host knows them,
            else on the device.
    """

    nums: list[int]
    token_ids: Tensor

    @classmethod
    def of(cls, token_ids: Sequence[Sequence[int]]) -> Self:
        """Return drafts that the host knows."""
        flat = [token for tokens in token_ids for token in tokens]
        return cls([len(tokens) for tokens in token_ids], torch.tensor(flat, dtype=torch.int64))


class Drafter:
    """A source of drafts. Every rank has its own, and all produce the same drafts. The base class has none.

    Args:
        num_speculative_tokens: Limit of a request's drafts in a step; 0 for steps with one token of each decode.

    Attributes:
        drafts_always: Whether every step drafts, not only steps where drafts pay.
        reads_tokens: Whether it reads all previous tokens on the host, so that the engine waits for a step before it
            drafts; other drafters take the tokens under way from the device.
        synthetic_rates: Rates at which random numbers accept the drafts (`runtime/simulated.py`); empty if the model
            decides.
    """

    drafts_always = False
    reads_tokens = True
    synthetic_rates: tuple[float, ...] = ()

    def __init__(self, num_speculative_tokens: int = 0) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    def draft(self, wanted: Sequence[tuple[Request, int]], previous: "InFlightStep | None") -> Drafts:
        """Draft the next tokens of some requests. The engine calls it for each step, before the launch.

        Args:
            wanted: Requests that the step computes, and the limit of drafts of each.
            previous: The previous step, under way or not; None before the first.
        Returns:
            Drafts of each request, at most its limit.
        """
        return Drafts.of([])

    def follow(self, by: "StepGraph | StepMetadata") -> None:
        """Run what drafting runs over a whole step, over arbitrary tokens; collective over the TP group.

        Args:
            by: What the step was run by.
        """

    def complete(self, step: "InFlightStep") -> None:
        """Write what the drafter caches for the tokens of a step, which leaves for another job. Collective.

        Args:
            step: The latest step, whose tokens are known on the device.
        """

    def compared(self, drafts: Tensor, sampled: Tensor, nums: Sequence[int]) -> Compared:
        """Return the numbers that decide whether drafts are accepted (`verify`): drafts and sampled tokens.

        Args:
            nums: [n] number of drafts of each request.
        """
        return Compared(drafts, sampled)

    def candidates(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return the requests for which drafts exist: all."""
        return requests

    def close(self) -> None:
        """Free the drafter's memory."""


def agree_on_drafts(token_ids: Tensor, mesh: DCPMesh) -> Tensor:
    """Return the first rank's drafts of a module, which other ranks may have rounded elsewise. Collective over the TP
    group.
    """
    if mesh.tp_size > 1:
        with named("agreeing on drafts", mesh.tp_group):
            dist.broadcast(token_ids, group=mesh.tp_group, group_src=0)
    return token_ids
