"""From a checkpoint to a running engine (`load_engine`)."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import psutil
import torch
import torch.distributed as dist

from dcpmla.attention.backends.choice import check_backends
from dcpmla.attention.step.chunks import max_chunk_tokens
from dcpmla.cache.plan import CachePlan
from dcpmla.cache.states import num_states
from dcpmla.cache.tier import HostTier
from dcpmla.comm.select import ChosenExchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.decode_graphs import GraphMaker
from dcpmla.integrations.eagle3 import LABEL, Eagle3Files, open_eagle3
from dcpmla.integrations.engine_maker import EngineMaker
from dcpmla.integrations.engine_options import OWN_MODULES, EngineOptions
from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.offloading import (
    check_scales,
    host_bytes_of_rank,
    make_disk_tier,
    make_host_memory,
    open_folder,
)
from dcpmla.integrations.open_model import ModelFiles, check_layout, open_model, warn_of_unknown_tokens
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.integrations.speculation import check_speculation
from dcpmla.integrations.tier_speeds import measure, prefills
from dcpmla.integrations.transformers import load_model
from dcpmla.job.bootstrap import agree, check_equal_arguments
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.planning.hot import check_tiers
from dcpmla.runtime import compilations
from dcpmla.runtime.batch import MAX_SCORED
from dcpmla.runtime.choice_memory import touch_choice_memory
from dcpmla.runtime.costs import LoadCosts
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.warm_up import warm_up

_EMPTY_BLOCK_BYTES = 4096  # assumed size of a block in a model with only windows, which store nothing in blocks


def load_engine(
    model: str | ModelFiles,
    dcp: DCPConfig,
    mesh: DCPMesh,
    chosen: ChosenExchange,
    device: torch.device,
    options: EngineOptions | None = None,
    *,
    seq_lens: Sequence[int] | None = None,
    num_local_ranks: int = 1,
    on_step: Callable[[str], object] = lambda line: None,
) -> Engine:
    """Load the weights, allocate the cache and, on GPUs, capture steps as CUDA graphs. Collective over the job, whose
    ranks must be the TP group.

    Two sizes of each kind of graph, captured over a cache of one block, show the memory of all graphs; the cache gets
    the rest. If steps of a kind cannot be captured, the first rank logs the reason, and they run eagerly.

    Args:
        model: Directory, hub id, or result of `open_model`.
        chosen: Exchange from `select_exchange`.
        options: Options of the engine; None for the defaults.
        seq_lens: Lengths of all future sequences, if known: the cache is then no larger than their total.
        num_local_ranks: Number of ranks that share the host's memory.
        on_step: Function of a line on the next capture or step, called before it.
    Raises:
        ValueError: The checkpoint is broken, sizes do not divide, the model does not support an option, or memory does
            not hold the longest sequence.
        RuntimeError: A step fails or aborts its capture (`GraphSet.capture`).
    """
    options = options or EngineOptions()
    if device.type == "cuda":
        compilations.end_watch()
    files, dcp, eagle3 = _open(model, dcp, device, options)
    with agree():
        drafts = options.speculative_method in OWN_MODULES, eagle3
        formats = options.enable_expert_parallel, options.load_format, options.expert_dtype, *drafts
        placed = dcp, mesh, chosen, options.torch_dtype, device
        sharded = load_model(files.directory, files.config, *placed, *formats)
        num_running = min(options.max_num_seqs, len(seq_lens)) if seq_lens else options.max_num_seqs
        make = EngineMaker(sharded, files, dcp, options, num_running, on_step)
    if mesh.tp_rank == 0:
        warn_of_unknown_tokens(files)
    new_kernels = make.rehearse(num_local_ranks)
    num_bytes, most = options.kv_cache_memory_bytes, seq_lens
    if num_bytes is None:
        num_bytes = _free_bytes(sharded, options, num_local_ranks, make.makers if make.is_captured else [])
        if device.type == "cpu":  # whose memory is for other programs, too
            most = seq_lens or [files.max_model_len] * num_running
    with agree():
        num_host_bytes = host_bytes_of_rank(options.kv_offloading_size or 0, mesh.tp_size, num_local_ranks)
    sizes = num_bytes, num_host_bytes, num_running, options.max_query_len - 1
    plan = _plan_cache(sharded, seq_lens, most, *sizes)
    with agree():
        cache = plan.allocate(device)
        memory, tier = make_host_memory(cache, options.kv_offloading_size, mesh.tp_size, num_local_ranks)
    folder = open_folder(options, files, plan, sharded)
    tier.disk = make_disk_tier(folder, memory, options, plan, mesh)
    parts = plan, cache, make.capture(cache)
    if make.needs_warm_up:
        # An engine of its own: its blocks reach no disk, and the content of the disk's files stays known.
        warm_up(make.engine(*parts, memory, HostTier(tier.blocks.num_slots, tier.states.num_slots)), new_kernels)
    load_costs: Sequence[LoadCosts] = ()
    if memory is not None:
        limit = options.max_num_batched_tokens
        # With scales from the first prompt, no prompt may run before. A profile runs all but attention.
        is_profiled = dcp.calculate_kv_scales
        prefill = (sharded.profile, limit) if is_profiled else prefills(make.engine(*parts, None, HostTier()))
        speeds = measure(plan, memory, tier.blocks.num_slots, folder, *prefill, mesh)
        load_costs = speeds.costs(plan, make.costs, limit, mesh.tp_rank == 0)
    engine = make.engine(*parts, memory, tier, *load_costs)
    if make.needs_warm_up:
        engine.compilations = compilations.watch()
    return engine


def _open(
    model: str | ModelFiles, dcp: DCPConfig, device: torch.device, options: EngineOptions
) -> tuple[ModelFiles, DCPConfig, Eagle3Files | None]:
    """Open a model; return its files, the layout with a workspace for the model's contexts, and the EAGLE3 head, if one
    drafts. Collective over the job.

    Raises:
        ValueError: The model does not support the layout or an option, or ranks have other files.
    """
    with agree():
        files = model if isinstance(model, ModelFiles) else open_model(model)
        check_layout(files, dcp)
        check_backends(dcp, device)
        eagle3 = None if options.speculative_model is None else open_eagle3(options.speculative_model)
        check_speculation(files.config, dcp, options.speculative_method, eagle3, options.num_speculative_tokens)
        check_scales(dcp, options)
        check_tiers(dcp.kv_hot_tokens, options.kv_offloading_size, kv_offloading_path=options.kv_offloading_path)
    digests = {f"{name} of the model's directory": digest for name, digest in files.digests.items()}
    check_equal_arguments(digests | ({} if eagle3 is None else {f"config.json of {LABEL}": eagle3.digest}))
    alignment = attention_of(files.config).chunk_alignment(dcp)
    workspace = max_chunk_tokens(files.max_model_len, options.max_num_seqs, alignment)
    return files, replace(dcp, context_workspace_tokens=workspace), eagle3


def _plan_cache(
    model: ShardedModel,
    seq_lens: Sequence[int] | None,
    most: Sequence[int] | None,
    num_bytes: int,
    num_host_bytes: int,
    num_running: int,
    num_drafts: int,
) -> CachePlan:
    """Plan the blocks that fit on the rank with the least memory, and states, if the model has them, of all requests
    that may run and of some remembered ones.

    Args:
        seq_lens: Lengths of all future sequences, if known; the longest must fit.
        most: Lengths of sequences that need no more blocks than the cache may have; None for any number.
        num_bytes, num_host_bytes: Bytes of the device and of host memory for the cache on this rank.
    """

    def planned(lens: Sequence[int]) -> CachePlan:
        placed = model.placement.dcp, lens, model.dtype
        return model.attention.plan_cache(*placed, num_states(num_running), num_drafts)

    lens = list(seq_lens) if seq_lens else [1]
    plan = planned(lens)
    block_bytes = plan.bytes_per_block or _EMPTY_BLOCK_BYTES
    state_bytes = plan.num_states * plan.bytes_per_state
    num_blocks = max(0, num_bytes - state_bytes - plan.bytes_fixed) // block_bytes
    if plan.host_bytes_per_block:
        num_blocks = min(num_blocks, num_host_bytes // plan.host_bytes_per_block)
    affordable = torch.tensor(num_blocks, device=model.device)
    dist.all_reduce(affordable, op=dist.ReduceOp.MIN, group=model.placement.mesh.tp_group)
    longest = -(-max(lens) // plan.block_tokens) * block_bytes
    if int(affordable) * block_bytes < longest:
        states = f" beside {state_bytes:,} for the states of {plan.num_states} requests" if plan.num_states else ""
        fewer = "let fewer requests run (--max-num-seqs), " if plan.num_states else ""
        raise ValueError(
            f"cache: the longest sequence, {max(lens):,} tokens, needs {longest:,} bytes a rank, but there is room for "
            f"{int(affordable) * block_bytes:,}{states}; shorten it (--max-model-len, --max-new-tokens), {fewer}"
            f"raise --kv-cache-memory-bytes, or shard over more ranks (-dcp)"
        )
    num_blocks = min(planned(most).num_blocks, int(affordable)) if most else int(affordable)
    return replace(plan, num_blocks=num_blocks)


def profile_step(model: ShardedModel, options: EngineOptions) -> None:
    """Run the largest step over dummy tokens, with the choice of its new tokens and the log probabilities of as many
    tokens of prompts as a step scores. Collective over the TP group.
    """
    num_tokens = options.max_num_batched_tokens
    num_choices = min(num_tokens, options.max_num_seqs * options.max_query_len)
    logits = model.profile(num_tokens, min(num_tokens, num_choices + MAX_SCORED))
    touch_choice_memory(logits, num_choices, options.max_query_len)


def _free_bytes(model: ShardedModel, options: EngineOptions, num_local_ranks: int, graphs: Sequence[GraphMaker]) -> int:
    """Return this rank's bytes for the cache: the usable memory, less the needs of the largest step and of graphs."""
    utilization = options.gpu_memory_utilization
    if model.device.type == "cpu":
        return int(psutil.virtual_memory().available * utilization / num_local_ranks)
    gc.collect()  # graphs refer to themselves, so the rehearsal's would stay in memory
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    profile_step(model, options)
    step_bytes = torch.cuda.max_memory_allocated(model.device) - before
    graph_bytes = sum(maker.measure() for maker in graphs)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return max(0, free - step_bytes - graph_bytes - int(total * (1 - utilization)))
