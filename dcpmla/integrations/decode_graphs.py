"""CUDA graphs of a whole model: measured before there is a cache, captured over it."""

import gc
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Self

import torch
from torch import Tensor
from tqdm import tqdm

from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.cache.layers import Cache
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.runtime.capture import CannotCapture, Track
from dcpmla.runtime.graph import Step, StepGraph

_logger = logging.getLogger(__name__)


# Function of a cache, of the builder of steps over it, and of the longest sequence.
NewGraph = Callable[[Cache, StepBuilder, int], StepGraph]


class GraphMaker:
    """The maker of a model's graphs over one cache or another; after a failure it no longer tries. Collective over the
    TP group.

    Args:
        name: Name of the steps in a warning and a progress bar.
        new: Function that returns graphs over a cache, not captured.
        max_model_len: Longest sequence.
        max_num_seqs: Limit of requests in a step.
        num_drafts: Limit of a request's drafts in a step.
        num_past: Tokens by which a request may pass the longest sequence in these graphs.
    """

    def __init__(
        self,
        name: str,
        new: NewGraph,
        model: ShardedModel,
        max_model_len: int,
        max_num_seqs: int,
        num_drafts: int,
        num_past: int = 0,
    ) -> None:
        self._name, self._new, self._model, self._num_past = name, new, model, num_past
        self._dcp, self._mesh = model.placement.dcp, model.placement.mesh
        self._max_model_len, self._max_num_seqs, self._num_drafts = max_model_len, max_num_seqs, num_drafts
        self._has_failed = False

    @classmethod
    def decodes(
        cls,
        name: str,
        model: ShardedModel,
        step: Step,
        input_like: Tensor,
        max_model_len: int,
        max_num_seqs: int,
        query_len: int,
        is_block: bool = False,
    ) -> Self:
        """Return the maker of graphs of steps with query_len tokens per request (`StepGraph.decodes`); those of a block
        may pass the longest sequence.
        """

        def new(cache: Cache, steps: StepBuilder, longest: int) -> StepGraph:
            sizes = max_num_seqs, longest, query_len, is_block
            return StepGraph.decodes(step, input_like, cache, steps, model.placement.mesh, *sizes)

        return cls(name, new, model, max_model_len, max_num_seqs, query_len - 1, query_len * is_block)

    def capture(self, cache: Cache, on_step: Callable[[str], object] = lambda line: None) -> StepGraph | None:
        """Capture the graphs over a cache; or return None, and the first rank logs the reason.

        The first rank shows a progress bar if it has a terminal.

        Args:
            on_step: Function of a line on the next capture, called before it.
        """

        def track(sizes: Sequence[Hashable]) -> Iterator[Hashable]:
            disable = None if self._mesh.tp_rank == 0 else True
            for size in tqdm(sizes, desc=f"capturing {self._name}", unit="graph", disable=disable):
                on_step(f"capturing {self._name}: {size}")
                yield size

        return self._capture(cache, track=track)

    def make(self, cache: Cache, longest: int | None = None) -> StepGraph:
        """Return the graphs over a cache, not captured: they pad their steps, and run them eagerly.

        Args:
            longest: Longest sequence; None for the longest that the cache holds.
        """
        longest = min(self._max_model_len, cache.sizes.tokens_total) if longest is None else longest
        steps = self._model.attention.step_builder(cache.sizes, self._dcp, self._mesh.dcp_rank, self._model.device)
        return self._new(cache, steps, longest + self._num_past)

    def measure(self) -> int:
        """Return the bytes of this rank's GPU that graphs take apart from their cache.

        The graph of the largest size over a cache of one block shows the bytes of activations and static memory, a
        second one the bytes of each further graph; all are freed with the graphs.
        """
        model = self._model
        plan = model.attention.plan_cache(self._dcp, [1], model.dtype, self._max_num_seqs, self._num_drafts)
        # Graphs have the full length because the memory of token selection grows with it.
        cache, free, num_sizes = plan.allocate(model.device), [], 0
        for number in (2, 1):
            graph = self._capture(cache, self._max_model_len, number)
            free.append(_free_bytes(model.device))
            num_sizes = 0 if graph is None else graph.num_full_sizes
            del graph
            gc.collect()  # graphs refer to themselves, and would keep their memory
        with_two, with_one, without = *free, _free_bytes(model.device)
        return without - with_one + max(0, with_one - with_two) * max(0, num_sizes - 1)

    def _capture(
        self, cache: Cache, longest: int | None = None, num_sizes: int | None = None, track: Track = iter
    ) -> StepGraph | None:
        if self._has_failed:
            return None
        graph = self.make(cache, longest)
        try:
            graph.capture(num_sizes, track)
        except CannotCapture as reason:
            self._has_failed = True
            if self._mesh.tp_rank == 0:
                _logger.warning("%s run without CUDA graphs: %s", self._name, reason)
            return None
        return graph


def _free_bytes(device: torch.device) -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
