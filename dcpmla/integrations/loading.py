"""From a checkpoint to a running engine: `open_model`, then `load_engine`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import transformers

from dcpmla.attention.backends import check_backends
from dcpmla.attention.chunks import context_workspace_tokens
from dcpmla.cache.plan import CachePlan
from dcpmla.cache.states import num_states
from dcpmla.comm.select import ChosenExchange
from dcpmla.config import MODEL_DTYPES, DCPConfig
from dcpmla.fields import FLAG, check_fields, number, one_of, option_label, optional, whole
from dcpmla.integrations.decode_graphs import GraphMaker
from dcpmla.integrations.families.table import attention_kind
from dcpmla.integrations.model_files import find_commit, find_model, load_config
from dcpmla.integrations.model_size import read_model
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.integrations.speculation import (
    MAX_SPECULATIVE_TOKENS,
    SPECULATIVE_METHODS,
    check_speculation,
    make_drafter,
    mtp_graphs,
)
from dcpmla.integrations.tokenizer import load_tokenizer
from dcpmla.integrations.transformers import load_model
from dcpmla.job.bootstrap import agree, check_equal_arguments
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.planning.machine import H200X8
from dcpmla.planning.predict import Setting
from dcpmla.planning.prefill import PrefillCosts
from dcpmla.runtime.acceptance import MAX_DRAFT_ROWS
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.text import Tokenizer
from dcpmla.runtime.warm_up import warm_up

_EMPTY_BLOCK_BYTES = 4096  # assumed size of a block in a model with only windows, which store nothing in blocks
_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_OPTION_RULES = {
    "dtype": one_of(MODEL_DTYPES),
    "max_num_batched_tokens": whole(1),
    "max_num_seqs": whole(1),
    "max_prefill_ms": optional(number(0, above=True)),
    "kv_cache_memory_bytes": optional(whole(1)),
    "gpu_memory_utilization": number(0, 1, above=True),
    "enable_prefix_caching": FLAG,
    "enable_expert_parallel": FLAG,
    "enforce_eager": FLAG,
    "load_format": one_of(("auto", "dummy")),
    "expert_dtype": one_of(("auto", "fp8")),
    "speculative_method": one_of(SPECULATIVE_METHODS),
    "num_speculative_tokens": whole(1, MAX_SPECULATIVE_TOKENS),
}
ENGINE_OPTIONS = tuple(_OPTION_RULES)  # keywords of load_engine that are its user's choice


@dataclass(frozen=True)
class ModelFiles:
    """A model before its weights are read.

    Attributes:
        tokenizer: Tokenizer, or None if it does not load, for the reason in no_tokenizer.
        max_model_len: Longest sequence to serve.
        digests: Hashes of the files that must be the same on every rank, because each rank decides when a request ends,
            for example. The commit comes first.
        commit: Commit of the snapshot, if the model comes from the hub.
    """

    directory: Path
    config: Any
    tokenizer: Tokenizer | None
    no_tokenizer: str
    max_model_len: int
    digests: dict[str, str]
    commit: str | None = None


def open_model(model: str, max_model_len: int | None = None, revision: str | None = None) -> ModelFiles:
    """Find a model, and read its config and tokenizer. transformers' progress bars and notes are off from here on.

    Args:
        model: Directory or hub id.
        max_model_len: Longest sequence; default and maximum are the model's positions.
        revision: Branch, tag or commit of a hub id; None for its main branch.
    Raises:
        ValueError: The model does not exist or is not MLA, or the length is outside [2, max_position_embeddings].
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    directory = find_model(model, revision)
    config = load_config(directory)
    longest = config.max_position_embeddings
    if max_model_len is None:
        max_model_len = longest
    elif not isinstance(max_model_len, int) or not 2 <= max_model_len <= longest:
        raise ValueError(
            f"max_model_len (--max-model-len) is {max_model_len!r}; it must be in [2, {longest}], "
            f"where the model's positions end"
        )
    tokenizer, reason = load_tokenizer(directory)
    commit = find_commit(directory)
    digests = {"commit": str(commit)} | _digests(directory, tokenizer)
    return ModelFiles(directory, config, tokenizer, reason, max_model_len, digests, commit)


def load_engine(
    model: str | ModelFiles,
    dcp: DCPConfig,
    mesh: DCPMesh,
    chosen: ChosenExchange,
    device: torch.device,
    *,
    dtype: torch.dtype | str = "auto",
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    max_prefill_ms: float | None = None,
    seq_lens: Sequence[int] | None = None,
    kv_cache_memory_bytes: int | None = None,
    gpu_memory_utilization: float = 0.9,
    num_local_ranks: int = 1,
    enable_prefix_caching: bool = True,
    enable_expert_parallel: bool = False,
    enforce_eager: bool = False,
    load_format: str = "auto",
    expert_dtype: str = "auto",
    speculative_method: str = "none",
    num_speculative_tokens: int = 3,
    on_step: Callable[[str], object] = lambda line: None,
) -> Engine:
    """Load the weights, allocate the cache and, on GPUs, capture decode graphs. Collective over the job, whose ranks
    must be the TP group.

    Capturing decode graphs once over a cache of one block measures their memory; the cache gets the rest, then they
    are captured over it. If a step cannot be captured, the first rank prints why and decodes run eagerly.

    Args:
        model: Directory, hub id, or result of `open_model`.
        chosen: Exchange from `select_exchange`.
        dtype: Dtype of computation, a name or torch's; "auto" takes the checkpoint's, but bfloat16 for float16,
            whose range many models exceed. Also the cache's dtype if dcp.kv_cache_dtype is "auto".
        max_num_batched_tokens: Limit of one step's tokens.
        max_num_seqs: Limit of requests that run at the same time.
        max_prefill_ms: Limit in milliseconds, by the planner's model, for pieces of prompts in a step in which requests
            decode; None for the time of max_num_batched_tokens tokens without a context.
        seq_lens: Lengths of all future sequences, if known: the cache is then no larger than their total.
        kv_cache_memory_bytes: Size of the cache on each rank; by default the free memory after loading, less a step's
            largest activations and decode graphs.
        gpu_memory_utilization: Share of a device's memory to use, in (0, 1]; on CPUs, share of the host's free memory,
            divided among num_local_ranks.
        enable_prefix_caching: Whether to reuse cached blocks of earlier requests that begin with the same tokens.
        enable_expert_parallel: Whether to distribute whole experts over the ranks instead of slices.
        enforce_eager: Whether to run without decode graphs.
        expert_dtype: Format of experts: "auto" leaves them as stored; "fp8" re-encodes 4-bit ones (DeepSeek-V4) without
            rounding: twice the memory, and faster products.
        speculative_method: Source of drafts: "ngram" looks up the last tokens in the request's own, "mtp" runs the
            checkpoint's MTP module.
        num_speculative_tokens: Limit of a request's drafts in a step.
        load_format: Source of weights: "auto" reads the checkpoint, "dummy" needs none and draws random weights, for
            measurements.
        on_step: Function of a line on the next step, called before it.
    Raises:
        ValueError: The checkpoint is broken, sizes do not divide, the model does not support an option, or memory does
            not hold the longest sequence.
        RuntimeError: A decode step fails or aborts its capture (`DecodeGraph.capture`).
    """
    dtype = str(dtype).removeprefix("torch.")
    check_fields(_OPTION_RULES, locals(), option_label)
    with agree():
        files = model if isinstance(model, ModelFiles) else open_model(model)
        check_layout(files, dcp)
        check_backends(dcp, device)
        check_speculation(files.config, dcp, speculative_method)
    has_mtp = speculative_method == "mtp"
    alignment = attention_kind(files.config).chunk_alignment(dcp)
    workspace = context_workspace_tokens(files.max_model_len, max_num_seqs, alignment)
    dcp = replace(dcp, context_workspace_tokens=workspace)
    check_equal_arguments({f"{name} of the model's directory": digest for name, digest in files.digests.items()})
    with agree():
        sharded = load_model(
            files.directory,
            files.config,
            dcp,
            mesh,
            chosen,
            _DTYPES[dtype],
            device,
            enable_expert_parallel,
            load_format,
            expert_dtype,
            has_mtp,
        )
    num_seqs = min(max_num_seqs, max_num_batched_tokens, len(seq_lens) if seq_lens else max_num_seqs)
    query_len = 1 if speculative_method == "none" else 1 + num_speculative_tokens
    if has_mtp:
        sharded.keep_hidden_states(max(max_num_batched_tokens, num_seqs, MAX_DRAFT_ROWS))
    token, sizes = torch.zeros((), dtype=torch.int64, device=device), (num_seqs, files.max_model_len)
    makers = [GraphMaker(sharded, sharded.decode, token, dcp, mesh, *sizes, query_len)]
    if has_mtp:
        makers += mtp_graphs(num_speculative_tokens, sharded, dcp, mesh, *sizes)
    captures = device.type == "cuda" and not enforce_eager
    num_bytes = kv_cache_memory_bytes
    if num_bytes is None:
        num_bytes = _free_bytes(
            sharded,
            gpu_memory_utilization,
            num_local_ranks,
            max_num_batched_tokens,
            max_num_seqs,
            makers if captures else [],
        )
    num_running = min(max_num_seqs, len(seq_lens)) if seq_lens else max_num_seqs
    plan = _plan_cache(sharded, dcp, mesh, seq_lens, num_bytes, num_running, query_len - 1)
    with agree():
        cache = plan.allocate(device)
        costs = _piece_costs(files.config, dcp, enable_expert_parallel, max_num_batched_tokens, max_prefill_ms)
    graph, *of_mtp = [maker.capture(cache) if captures else None for maker in makers]
    mtp = [captured or maker.make(cache) for captured, maker in zip(of_mtp, makers[1:], strict=True)]
    drafter = make_drafter(speculative_method, num_speculative_tokens, sharded, cache, mesh, mtp)
    if plan.num_states:  # fewer if seq_lens has fewer requests
        max_num_seqs = min(max_num_seqs, plan.num_states)
    new_engine = partial(
        Engine,
        sharded,
        cache,
        dcp,
        mesh,
        files.max_model_len,
        max_num_batched_tokens,
        max_num_seqs,
        files.tokenizer,
        on_step,
        graph,
        enable_prefix_caching,
        drafter,
        costs=costs,
    )
    if device.type == "cuda" and not dcp.calculate_kv_scales:  # the first prompt sets the scales
        warm_up(new_engine())
    return new_engine()


def check_layout(files: ModelFiles, dcp: DCPConfig) -> None:
    """Raise ValueError, before any weight is read, if heads do not divide by the TP size, the model does not support an
    option, or a backend does not exist.
    """
    check_backends(dcp)
    attention_kind(files.config).check_layout(dcp)


def _piece_costs(
    config: Any,
    dcp: DCPConfig,
    enable_expert_parallel: bool,
    max_num_batched_tokens: int,
    max_prefill_ms: float | None,
) -> PrefillCosts:
    """Return the modelled time of pieces of prompts.

    All devices use an H200's times: the default limit compares them with each other, and all ranks must agree.
    """
    setting = Setting(
        tp=dcp.tensor_parallel_size,
        dcp=dcp.decode_context_parallel_size,
        kv_cache_dtype="bf16" if dcp.kv_cache_dtype == "auto" else dcp.kv_cache_dtype,
        enable_expert_parallel=enable_expert_parallel,
    )
    return PrefillCosts(H200X8, read_model(config), setting, max_num_batched_tokens, max_prefill_ms)


def _plan_cache(
    model: ShardedModel,
    dcp: DCPConfig,
    mesh: DCPMesh,
    seq_lens: Sequence[int] | None,
    num_bytes: int,
    num_running: int,
    num_drafts: int,
) -> CachePlan:
    """Plan the blocks that the sequences need together, or that fit on the rank with the least memory, and states, if
    the model has them, of all requests that may run and of some remembered ones.
    """
    lens = list(seq_lens) if seq_lens else [1]
    plan = model.attention.plan_cache(dcp, lens, model.dtype, num_states(num_running), num_drafts)
    block_bytes = plan.bytes_per_block or _EMPTY_BLOCK_BYTES
    state_bytes = plan.num_states * plan.bytes_per_state
    affordable = torch.tensor(max(0, num_bytes - state_bytes) // block_bytes, device=model.device)
    dist.all_reduce(affordable, op=dist.ReduceOp.MIN, group=mesh.tp_group)
    longest = -(-max(lens) // plan.block_tokens) * block_bytes
    if int(affordable) * block_bytes < longest:
        states = f" beside {state_bytes:,} for the states of {plan.num_states} requests" if plan.num_states else ""
        fewer = "let fewer requests run (--max-num-seqs), " if plan.num_states else ""
        raise ValueError(
            f"cache: the longest sequence, {max(lens):,} tokens, needs {longest:,} bytes a rank, but there is room for "
            f"{int(affordable) * block_bytes:,}{states}; shorten it (--max-model-len, --max-new-tokens), {fewer}"
            f"raise --kv-cache-memory-bytes, or shard over more ranks (-dcp)"
        )
    return replace(plan, num_blocks=min(plan.num_blocks, int(affordable)) if seq_lens else int(affordable))


def _free_bytes(
    model: ShardedModel,
    utilization: float,
    num_local_ranks: int,
    num_tokens: int,
    num_logits: int,
    graphs: Sequence[GraphMaker],
) -> int:
    """Find this rank's bytes for the cache: the usable memory, less the needs of the largest step and decode graphs."""
    if model.device.type == "cpu":
        return int(psutil.virtual_memory().available * utilization / num_local_ranks)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    model.profile(num_tokens, min(num_tokens, num_logits))
    step_bytes = torch.cuda.max_memory_allocated(model.device) - before
    graph_bytes = sum(maker.measure() for maker in graphs)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return max(0, free - step_bytes - graph_bytes - int(total * (1 - utilization)))


def _digests(directory: Path, tokenizer: Any) -> dict[str, str]:
    """Hash the files of config and tokenizer, by name; add the tokenizer's class, which depends on the installation."""
    paths = [
        path
        for pattern in ("*config.json", "tokenizer.*", "*.model", "*.index.json")
        for path in sorted(directory.glob(pattern))
    ]
    return {path.name: sha256(path.read_bytes()).hexdigest()[:12] for path in paths} | {
        "tokenizer": type(tokenizer).__name__
    }
