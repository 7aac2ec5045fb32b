"""From a checkpoint to a running engine: `open_model`, then `load_engine`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import transformers

from dcpmla.attention.build import context_workspace_tokens
from dcpmla.cache.latent import CachePlan, LatentCache, num_blocks
from dcpmla.comm.select import ChosenExchange
from dcpmla.config import DCPConfig, MLAConfig
from dcpmla.hf_config import check_index_options
from dcpmla.integrations.decode_graphs import GraphMaker
from dcpmla.integrations.transformers import ShardedModel, find_model, load_config, load_model
from dcpmla.job.bootstrap import agree, check_equal_arguments
from dcpmla.parallel.mesh import DCPMesh
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.text import Tokenizer


@dataclass(frozen=True)
class ModelFiles:
    """What is known of a model before its weights are read.

    Attributes:
        tokenizer: None where it does not load; no_tokenizer says why.
        max_model_len: longest sequence to serve.
        digests: of the files that every rank must read the same from: what ends a request, for one, each rank
            decides by itself.
    """

    directory: Path
    config: Any
    tokenizer: Tokenizer | None
    no_tokenizer: str
    max_model_len: int
    digests: dict[str, str]


def open_model(model: str, max_model_len: int | None = None) -> ModelFiles:
    """Find a model and read its config and tokenizer.

    Args:
        model: a directory, or a hub id.
        max_model_len: default, and at most, what the model's positions allow.
    Raises:
        ValueError: no such model, not MLA, or a length outside [2, max_position_embeddings].
    """
    directory = find_model(model)
    config = load_config(directory)
    longest = config.max_position_embeddings
    if max_model_len is not None and not 2 <= max_model_len <= longest:
        raise ValueError(
            f"--max-model-len is {max_model_len}; it must be in [2, {longest}], where the model's positions end"
        )
    tokenizer, reason = _load_tokenizer(directory)
    return ModelFiles(directory, config, tokenizer, reason, max_model_len or longest, _digests(directory, tokenizer))


def load_engine(
    files: ModelFiles,
    dcp: DCPConfig,
    mesh: DCPMesh,
    selection: ChosenExchange,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    seq_lens: Sequence[int] | None = None,
    kv_cache_memory_bytes: int | None = None,
    gpu_memory_utilization: float = 0.9,
    num_local_ranks: int = 1,
    enable_expert_parallel: bool = False,
    enforce_eager: bool = False,
    on_step: Callable[[str], object] = lambda line: None,
) -> Engine:
    """Load the weights, allocate the cache, on GPUs capture decode graphs. Collective over the job, whose ranks
    must be the TP group.

    What decode graphs take is found by capturing them once over a cache of one block; the cache gets the rest, then
    they are captured over it. Where a step cannot be captured, the first rank says why and decodes run eagerly.

    Args:
        dtype: to compute in; None takes the checkpoint's. Of the cache, too, where dcp.kv_cache_dtype is "auto".
        seq_lens: tokens of all sequences to come, where that is known: the cache then is no larger than they need
        together.
        kv_cache_memory_bytes: of the cache on each rank; default: what is free after loading, beside a step's
            largest activations and decode graphs.
        gpu_memory_utilization: part of a device's memory to use, in (0, 1]; on CPUs of the host's, shared by
        num_local_ranks.
        enforce_eager: no decode graphs.
    Raises:
        ValueError: a broken checkpoint, sizes that do not divide, options that the model has not, memory that does
            not hold the longest sequence.
        RuntimeError: a decode step that fails, or breaks its capture off (`DecodeGraph.capture`).
    """
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(
            f"gpu_memory_utilization (--gpu-memory-utilization) is {gpu_memory_utilization}; it must be in (0, 1]"
        )
    workspace = context_workspace_tokens(files.max_model_len, max_num_seqs, dcp)
    dcp = replace(dcp, context_workspace_tokens=workspace)
    check_equal_arguments({f"{name} of the model's directory": digest for name, digest in files.digests.items()})
    with agree():
        check_layout(files, dcp)
        model = load_model(files.directory, files.config, dcp, mesh, selection, dtype, device, enable_expert_parallel)
    graphs = None
    if device.type == "cuda" and not enforce_eager:
        num_seqs = min(max_num_seqs, max_num_batched_tokens, len(seq_lens) if seq_lens else max_num_seqs)
        graphs = GraphMaker(model, dcp, mesh, num_seqs, files.max_model_len)
    num_bytes = kv_cache_memory_bytes
    if num_bytes is None:
        num_bytes = _free_bytes(
            model, gpu_memory_utilization, num_local_ranks, max_num_batched_tokens, max_num_seqs, graphs
        )
    plan = _plan_cache(model, dcp, mesh, seq_lens, num_bytes)
    with agree():
        cache = LatentCache(plan, device)
    graph = graphs.capture(cache) if graphs else None
    return Engine(
        model,
        cache,
        dcp,
        mesh,
        files.max_model_len,
        max_num_batched_tokens,
        max_num_seqs,
        files.tokenizer,
        on_step,
        graph,
    )


def check_layout(files: ModelFiles, dcp: DCPConfig) -> None:
    """Raise ValueError, before any weight is read, for heads that do not divide by the TP size and options that the
    model has not.
    """
    attention = MLAConfig.from_hf(files.config)
    attention.heads_per_rank(dcp.tensor_parallel_size)
    check_index_options(attention, dcp)


def _plan_cache(
    model: ShardedModel, dcp: DCPConfig, mesh: DCPMesh, seq_lens: Sequence[int] | None, num_bytes: int
) -> CachePlan:
    """As many blocks as the sequences need together, or as the rank with the least memory has room for."""
    lens = list(seq_lens) if seq_lens else [1]
    plan = LatentCache.plan(
        model.attention_config, dcp, model.num_attention_layers, lens, model.dtype, model.index_layers
    )
    block_bytes = plan.bytes_per_rank // plan.num_blocks
    affordable = torch.tensor(num_bytes // block_bytes, device=model.device)
    dist.all_reduce(affordable, op=dist.ReduceOp.MIN, group=mesh.tp_group)
    longest, room = num_blocks(max(lens), dcp) * block_bytes, int(affordable) * block_bytes
    if room < longest:
        raise ValueError(
            f"cache: the longest sequence, {max(lens):,} tokens, needs {longest:,} bytes a rank, but there is room for {room:,}; "
            f"shorten it (--max-model-len, --max-new-tokens), raise --kv-cache-memory-bytes, or shard over more ranks (-dcp)"
        )
    return replace(plan, num_blocks=min(plan.num_blocks, int(affordable)) if seq_lens else int(affordable))


def _free_bytes(
    model: ShardedModel,
    utilization: float,
    num_local_ranks: int,
    num_tokens: int,
    num_logits: int,
    graphs: GraphMaker | None,
) -> int:
    """Bytes for the cache of this rank: what may be used, less what the largest step and decode graphs need."""
    if model.device.type == "cpu":
        return int(psutil.virtual_memory().available * utilization / num_local_ranks)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    model.profile(num_tokens, min(num_tokens, num_logits))
    step_bytes = torch.cuda.max_memory_allocated(model.device) - before
    graph_bytes = graphs.measure() if graphs else 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return max(0, free - step_bytes - graph_bytes - int(total * (1 - utilization)))


def _digests(directory: Path, tokenizer: Any) -> dict[str, str]:
    """Of the config's and the tokenizer's files; and whether the tokenizer loads here, which is a matter of what is
    installed, too.
    """
    paths = [
        path
        for pattern in ("*config.json", "tokenizer.*", "*.model", "*.index.json")
        for path in sorted(directory.glob(pattern))
    ]
    return {path.name: sha256(path.read_bytes()).hexdigest()[:12] for path in paths} | {
        "tokenizer": type(tokenizer).__name__
    }


def _load_tokenizer(directory: Path) -> tuple[Any, str]:
    """The model's tokenizer; or None, and why it does not load (none there, broken, or one that needs the checkpoint's
    own code).
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False), ""
    except Exception as error:  # a broken tokenizer.json raises whatever its reader stumbled over
        return None, f"{type(error).__name__}: {error}"
