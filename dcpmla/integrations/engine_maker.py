"""Engines over a loaded model: one for a rehearsal, one for the warm-up, one for requests (`EngineMaker`)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.cache.blocks import BlockAllocator
from dcpmla.cache.host import HostMemory
from dcpmla.cache.layers import Cache
from dcpmla.cache.plan import CachePlan
from dcpmla.cache.states import num_states
from dcpmla.cache.tier import HostTier
from dcpmla.config import DCPConfig
from dcpmla.integrations.decode_graphs import GraphMaker
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.model_size import read_model
from dcpmla.integrations.open_model import ModelFiles
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.integrations.shortened import shortened
from dcpmla.integrations.speculation import draft_graphs, make_drafter
from dcpmla.parallel.collectives import gather_values
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.machine import H200X8
from dcpmla.planning.prefill import PrefillCosts
from dcpmla.planning.setting import Setting
from dcpmla.runtime import compilations
from dcpmla.runtime.acceptance import MAX_DRAFT_ROWS
from dcpmla.runtime.costs import LoadCosts
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.graph import StepGraph
from dcpmla.runtime.made_steps import Made
from dcpmla.runtime.scheduler import Scheduler
from dcpmla.runtime.warm_up import rehearse

# Graphs of mixed steps, of decodes, then of a module that drafts; None for steps that run without.
Graphs = Sequence[StepGraph | None]


class EngineMaker:
    """The parts that all engines of a model have in common.

    Args:
        num_running: Limit of requests that run at the same time.
        on_step: Function of a line on the next capture or step, called before it.
    Attributes:
        makers: Makers of the graphs.
        costs: Modelled time of pieces of prompts.
    """

    def __init__(
        self,
        model: ShardedModel,
        files: ModelFiles,
        dcp: DCPConfig,
        options: EngineOptions,
        num_running: int,
        on_step: Callable[[str], object],
    ) -> None:
        self._model, self._files, self._dcp, self._options, self._on_step = model, files, dcp, options, on_step
        self._num_running, self._mesh = num_running, model.placement.mesh
        self.costs = _piece_costs(files.config, dcp, options)
        self.makers = _graph_makers(model, options, num_running, files.max_model_len, self.costs.tokens_per_request)

    @property
    def is_captured(self) -> bool:
        """Return whether steps are captured as CUDA graphs."""
        return self._model.device.type == "cuda" and not self._options.enforce_eager

    @property
    def needs_warm_up(self) -> bool:
        """Return whether kernels are compiled before the first request; not where the first prompt sets the scales."""
        return self._model.device.type == "cuda" and not self._dcp.calculate_kv_scales

    def capture(self, cache: Cache) -> Graphs:
        """Return the graphs over a cache, captured if they can be. Collective over the TP group."""
        is_captured, on_step = self.is_captured, self._on_step
        graphs = [maker.capture(cache, on_step) if is_captured else None for maker in self.makers]
        of_module = zip(graphs[2:], self.makers[2:], strict=True)
        return [*graphs[:2], *(graph or maker.make(cache) for graph, maker in of_module)]

    def engine(
        self,
        plan: CachePlan,
        cache: Cache,
        graphs: Graphs,
        memory: HostMemory | None,
        tier: HostTier,
        *load_costs: LoadCosts,
    ) -> Engine:
        """Return an engine over a cache.

        Args:
            memory, tier: Host memory, and what the scheduler knows of the tiers below the cache.
            load_costs: Costs of loads from host memory and from disks; empty where all loads pay.
        """
        options, files = self._options, self._files
        mixed, decodes, *of_module = graphs
        drafter = make_drafter(options, self._model, cache, [graph for graph in of_module if graph is not None])
        # The cache has fewer states if fewer requests are known to come.
        max_num_seqs = min(options.max_num_seqs, plan.num_states or options.max_num_seqs)
        limits = options.max_num_batched_tokens, max_num_seqs, options.enable_prefix_caching
        scheduler = Scheduler(BlockAllocator.of(plan), *limits, self.costs, tier, *load_costs)
        placed = self._model, cache, self._dcp, self._mesh, scheduler
        parts = decodes, drafter, mixed, memory
        return Engine(*placed, files.max_model_len, files.tokenizer, self._on_step, *parts)

    def rehearse(self, num_local_ranks: int) -> list[list[Made]]:
        """Compile the kernels of all steps, in parallel, over a cache of one block; return the steps that have kernels
        of their own (`warm_up`). Collective over the TP group.

        Args:
            num_local_ranks: Number of ranks that share a host, which share the work out.
        """
        if not self.needs_warm_up:
            return []
        self._on_step("compiling kernels")
        model, options, group = self._model, self._options, self._mesh.tp_group
        meet = partial(gather_values, None, group, "compiling kernels")
        with compilations.rehearsal(self._mesh.tp_rank % num_local_ranks, num_local_ranks, meet) as launched:
            model.profile(options.max_num_batched_tokens)
            states = num_states(self._num_running), options.max_query_len - 1
            plan = model.attention.plan_cache(self._dcp, [1], model.dtype, *states)
            cache = plan.allocate(model.device)
            made: list[StepGraph] = [maker.make(cache, self._files.max_model_len) for maker in self.makers]
            graphs: Graphs = made if self.is_captured else [None, None, *made[2:]]
            engine = self.engine(plan, cache, graphs, None, HostTier())
            with shortened(model):
                return rehearse(engine, filter(None, graphs), launched)


def _graph_makers(
    model: ShardedModel, options: EngineOptions, num_running: int, max_model_len: int, tokens_per_request: int
) -> Sequence[GraphMaker]:
    """Return the makers of the model's graphs of mixed steps and of decodes, then of its module that drafts.

    Args:
        num_running: Limit of requests that run at the same time.
        tokens_per_request: Width of the pieces that absorbed attention cuts requests into.
    """
    num_seqs, limit = min(num_running, options.max_num_batched_tokens), options.max_num_batched_tokens
    token = torch.zeros((), dtype=torch.int64, device=model.device)
    sizes, query_len = (max_model_len, num_seqs), options.max_query_len

    def new_mixed(cache: Cache, steps: StepBuilder, longest: int) -> StepGraph:
        mesh = model.placement.mesh
        return StepGraph.prompts(model, cache, steps, mesh, limit, num_seqs, longest, tokens_per_request)

    mixed = GraphMaker("steps with prompts", new_mixed, model, *sizes, query_len - 1)
    makers = [GraphMaker.decodes("decode steps", model, model.decode, token, *sizes, query_len)]
    if model.drafts is not None:
        model.drafts.keep(max(limit, num_seqs, MAX_DRAFT_ROWS))
        makers += draft_graphs(options.num_speculative_tokens, model, num_seqs, max_model_len)
    return [mixed, *makers]


def _piece_costs(config: Any, dcp: DCPConfig, options: EngineOptions) -> PrefillCosts:
    """Return the modelled time of pieces of prompts.

    All devices use an H200's times: the default limit compares them with each other, and all ranks must agree.
    """
    setting = Setting(
        tp=dcp.tensor_parallel_size,
        dcp=dcp.decode_context_parallel_size,
        kv_cache_dtype="bf16" if dcp.kv_cache_dtype == "auto" else dcp.kv_cache_dtype,
        enable_expert_parallel=options.enable_expert_parallel,
    )
    deployment = Deployment(H200X8, read_model(config), setting)
    return PrefillCosts(deployment, options.max_num_batched_tokens, options.max_prefill_ms)
