"""Decode graphs of a whole model: captured over its cache, measured before there is one, given up with a warning where
that fails.
"""

import logging

import torch
from torch import Tensor

from dcpmla.cache.plan import Cache
from dcpmla.config import DCPConfig
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.graph import CannotCapture, DecodeGraph, DecodeStep

_logger = logging.getLogger(__name__)


class GraphMaker:
    """The maker of a model's decode graphs over one cache or another; after a failure it no longer tries. Collective
    over the TP group.

    Args:
        step, input_like: as `DecodeGraph` takes them, of the model's.
        max_num_seqs: requests of the largest batch.
        max_model_len: tokens of the longest sequence.
        max_query_len: tokens of a request with all its drafts.
    """

    def __init__(
        self,
        model: ShardedModel,
        step: DecodeStep,
        input_like: Tensor,
        dcp: DCPConfig,
        mesh: DCPMesh,
        max_num_seqs: int,
        max_model_len: int,
        max_query_len: int = 1,
    ) -> None:
        self._model, self._step, self._input_like, self._dcp, self._mesh = model, step, input_like, dcp, mesh
        self._max_num_seqs, self._max_model_len, self._max_query_len = max_num_seqs, max_model_len, max_query_len
        self._has_failed = False

    def capture(self, cache: Cache) -> DecodeGraph | None:
        """Capture the graph over a cache; or return None, and the first rank logs why."""
        return self._capture(cache, min(self._max_model_len, cache.sizes.tokens_total))

    def make(self, cache: Cache) -> DecodeGraph:
        """Return the graph over a cache, not captured: it pads its steps, and runs them eagerly."""
        return self._make(cache, min(self._max_model_len, cache.sizes.tokens_total))

    def _make(self, cache: Cache, longest: int) -> DecodeGraph:
        limits = self._max_num_seqs, longest, self._max_query_len
        steps = self._model.attention.step_builder(cache.sizes, self._dcp, self._mesh.dcp_rank, self._model.device)
        return DecodeGraph(self._step, self._input_like, cache, steps, self._mesh, *limits)

    def _capture(self, cache: Cache, longest: int, num_sizes: int | None = None) -> DecodeGraph | None:
        if self._has_failed:
            return None
        graph = self._make(cache, longest)
        try:
            graph.capture(num_sizes)
        except CannotCapture as reason:
            self._has_failed = True
            if self._mesh.tp_rank == 0:
                _logger.warning("decode steps run without CUDA graphs: %s", reason)
            return None
        return graph

    def measure(self) -> int:
        """Return the bytes of this rank's GPU that graphs take apart from their cache.

        The graph of the largest batch over a cache of one block shows what activations and static memory take, a second
        one what each further graph takes: bytes that are free again once the graphs are dropped.
        """
        model = self._model
        drafts = self._max_query_len - 1
        plan = model.attention.plan_cache(self._dcp, [1], model.dtype, self._max_num_seqs, drafts)
        # At the full length: what selects among tokens grows with their number.
        cache, free, num_sizes = plan.allocate(model.device), [], 0
        for number in (2, 1):
            graph = self._capture(cache, self._max_model_len, number)
            free.append(_free_bytes(model.device))
            num_sizes = 0 if graph is None else graph.num_sizes
            del graph
        with_two, with_one, without = *free, _free_bytes(model.device)
        return without - with_one + (with_one - with_two) * max(0, num_sizes - 1)


def _free_bytes(device: torch.device) -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
