"""What the commands that run a model have in common: options, start-up, the engine."""

import argparse
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import transformers

from dcpmla.cli.values import positive, seconds
from dcpmla.comm.select import ChosenExchange, select_exchange
from dcpmla.config import (
    DCP_COMM_BACKENDS,
    DCP_EXCHANGE_DTYPES,
    DECODE_QUERY_DTYPES,
    INDEX_CACHE_DTYPES,
    KV_CACHE_DTYPES,
    DCPConfig,
)
from dcpmla.integrations.loading import ModelFiles, load_engine
from dcpmla.job.bootstrap import DEVICES, Ranks, assign_device, check_equal_arguments, process_groups
from dcpmla.job.launcher import LaunchInfo, find_launch_info
from dcpmla.job.rendezvous import agree_at, meet
from dcpmla.job.watchdog import Reported, Watchdog
from dcpmla.parallel.mesh import init_mesh
from dcpmla.runtime.engine import Engine

TIMEOUT = 60  # seconds, where no --timeout says otherwise
LOAD_TIMEOUT = (
    1800.0  # seconds that a rank may take to read its part of a checkpoint, to download one, or to write large files
)
_LINGER = 1.0  # seconds that rank 0, which may hold the store, stays for what the others still post there
_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


def add_engine_arguments(parser: argparse.ArgumentParser, dcp_sizes: Callable[[str], object] = int) -> None:
    """Options of a model, its cut and its engine; dcp_sizes reads the value of -dcp."""
    add = parser.add_argument
    add("--model", required=True, metavar="DIR_OR_ID", help="directory of a safetensors checkpoint, or a hub id")
    add(
        "-tp",
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="ranks that cut the heads; all ranks of the job",
    )
    add(
        "-dcp",
        "--decode-context-parallel-size",
        type=dcp_sizes,
        default="1",
        metavar="D",
        help="ranks that share one cache; divides -tp",
    )
    add("--cp-kv-cache-interleave-size", type=int, default=1, metavar="I", help="consecutive tokens on one rank")
    add("--dcp-comm-backend", choices=DCP_COMM_BACKENDS, default="auto")
    add(
        "--dcp-exchange-dtype",
        choices=DCP_EXCHANGE_DTYPES,
        default="auto",
        help="fp8: decode's rows travel as e4m3 (direct alone)",
    )
    add(
        "--dcp-exchange-timeout",
        type=seconds,
        default=60,
        metavar="S",
        help="seconds that direct waits for a rank's part of an exchange",
    )
    add(
        "--dcp-check-exchange",
        action="store_true",
        help="compare the ranks' calls of the exchange first: slow, for the search of bugs",
    )
    add(
        "--dcp-q-replicate",
        action="store_true",
        help="each rank projects the queries of all its DCP group's heads and gathers none",
    )
    add(
        "--dcp-project-before-merge",
        action="store_true",
        help="large decode steps apply W_UV first and exchange the narrower rows",
    )
    add(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="format of the latent cache; auto: the model's dtype",
    )
    add(
        "--kv-cache-scale",
        type=float,
        metavar="X",
        help="what values of an fp8 cache are multiplied by; default: the checkpoint's, or 1",
    )
    add(
        "--calculate-kv-scales",
        action="store_true",
        help="scales of fp8 caches and queries from the first prompt's values instead",
    )
    add(
        "--decode-query-dtype",
        choices=DECODE_QUERY_DTYPES,
        default="auto",
        help="fp8: decode multiplies e4m3 queries by an fp8 cache",
    )
    add(
        "--index-cache-dtype",
        choices=INDEX_CACHE_DTYPES,
        default="auto",
        help="of sparse MLA's index cache; auto: the model's dtype",
    )
    add(
        "--index-hadamard",
        action="store_true",
        help="spread the values of the indexer's keys and queries before they are rounded",
    )
    add(
        "--enable-expert-parallel",
        action="store_true",
        help="spread experts whole over the ranks instead of cutting each",
    )
    add("--block-size", type=int, default=64, metavar="P", help="tokens of a cache block on one rank")
    add("--max-num-batched-tokens", type=positive, default=8192, metavar="C", help="most tokens of one step")
    add("--max-num-seqs", type=positive, default=256, metavar="R", help="most requests that run at the same time")
    add("--max-model-len", type=int, metavar="L", help="longest sequence, prompt and answer; default: the model's")
    add(
        "--kv-cache-memory-bytes",
        type=positive,
        metavar="B",
        help="cache of one rank; default: what its requests need and memory allows",
    )
    add("--gpu-memory-utilization", type=float, default=0.9, metavar="F", help="part of the device's memory to use")
    add("--dtype", choices=tuple(_DTYPES), default="auto", help="auto: the checkpoint's")
    add("--enforce-eager", action="store_true", help="no CUDA graphs of decode steps")
    add_job_arguments(parser)


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of any job of ranks."""
    add = parser.add_argument
    add("--device", choices=DEVICES, default="auto")
    add(
        "--timeout",
        type=seconds,
        default=TIMEOUT,
        metavar="S",
        help="seconds in a step after which a rank counts as lost",
    )


@dataclass(frozen=True)
class Job:
    """A command's ranks, joined in torch.distributed."""

    ranks: Ranks
    watchdog: Watchdog


@contextmanager
def start(args: argparse.Namespace) -> Iterator[Job]:
    """`join`, for a command with -tp.

    Raises:
        ValueError: another number of ranks than -tp.
    """
    with join(args, partial(_check_num_ranks, args.tensor_parallel_size)) as job:
        yield job


@contextmanager
def join(args: argparse.Namespace, check: Callable[[LaunchInfo], object] = lambda _: None) -> Iterator[Job]:
    """Join the ranks that a launcher started, check that they were asked for the same, and part at the end.

    Args:
        check: what may be wrong (ValueError) with this rank's launch.
    Raises:
        ValueError: launches that cannot be, ranks with unequal arguments.
        ConnectionError: the ranks did not meet.
    """
    # The watchdog speaks first: torch's own limit only stands behind it.
    limit = timedelta(seconds=LOAD_TIMEOUT + 2 * args.timeout)
    with _met(args.timeout) as (launch, store, watchdog):
        with agree_at(store, launch):
            check(launch)
            ranks = assign_device(args.device, launch)
        _quiet(ranks)
        with process_groups(ranks, store, limit):
            watchdog.enter("comparing arguments")
            check_equal_arguments({key: value for key, value in vars(args).items() if key != "run"})
            yield Job(ranks, watchdog)
            watchdog.enter("shutdown")


def share_mistake(mistake: ValueError) -> None:
    """End the job for a mistake that this rank found before the ranks met: they meet for it, and one of them says it.

    Raises:
        Reported: it is said.
        ValueError, ConnectionError: they cannot meet; it is not said.
    """
    with _met(TIMEOUT) as (launch, store, _), agree_at(store, launch):
        raise mistake


@contextmanager
def _met(timeout: float) -> Iterator[tuple[LaunchInfo, dist.Store, Watchdog]]:
    launch = find_launch_info(os.environ, timedelta(seconds=timeout))
    store = meet(launch, timedelta(seconds=timeout))
    try:
        with Watchdog(store, launch.rank, launch.num_ranks, timeout) as watchdog:
            yield launch, store, watchdog
    except Reported:
        if launch.rank == 0 and launch.num_ranks > 1:
            time.sleep(_LINGER)
        raise


def _check_num_ranks(tensor_parallel_size: int, launch: LaunchInfo) -> None:
    if launch.num_ranks != tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size (-tp) is {tensor_parallel_size}, but {launch.num_ranks} ranks were started; "
            f"start torchrun with --nproc-per-node {tensor_parallel_size}, or set -tp {launch.num_ranks}"
        )


def dcp_config(args: argparse.Namespace, decode_context_parallel_size: int) -> DCPConfig:
    """The layout that the options ask for.

    Raises:
        ValueError: sizes that do not divide.
    """
    return DCPConfig(
        tensor_parallel_size=args.tensor_parallel_size,
        decode_context_parallel_size=decode_context_parallel_size,
        cp_kv_cache_interleave_size=args.cp_kv_cache_interleave_size,
        dcp_comm_backend=args.dcp_comm_backend,
        block_size=args.block_size,
        exchange_timeout=args.dcp_exchange_timeout,
        check_exchange=args.dcp_check_exchange,
        dcp_exchange_dtype=args.dcp_exchange_dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        kv_cache_scale=args.kv_cache_scale,
        calculate_kv_scales=args.calculate_kv_scales,
        decode_query_dtype=args.decode_query_dtype,
        index_cache_dtype=args.index_cache_dtype,
        index_hadamard=args.index_hadamard,
        dcp_q_replicate=args.dcp_q_replicate,
        dcp_project_before_merge=args.dcp_project_before_merge,
    )


def build_engine(
    args: argparse.Namespace, job: Job, dcp: DCPConfig, files: ModelFiles, seq_lens: Sequence[int] | None
) -> tuple[Engine, ChosenExchange]:
    """Load the model as the options say; rank 0 prints what came of it. Collective."""
    job.watchdog.enter("loading the model", LOAD_TIMEOUT)
    mesh = init_mesh(dcp.tensor_parallel_size, dcp.decode_context_parallel_size)
    selection = select_exchange(dcp, mesh.dcp_group, job.ranks.device)
    engine = load_engine(
        files,
        dcp,
        mesh,
        selection,
        job.ranks.device,
        dtype=_DTYPES[args.dtype],
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs,
        seq_lens=seq_lens,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        gpu_memory_utilization=args.gpu_memory_utilization,
        num_local_ranks=job.ranks.num_local_ranks,
        enable_expert_parallel=args.enable_expert_parallel,
        enforce_eager=args.enforce_eager,
        on_step=job.watchdog.enter,
    )
    if job.ranks.is_first:
        print(f"ranks: {job.ranks.origin}\ncache: {engine.cache.sizes}")
        print(f"exchange: {selection.exchange.name} ({selection.reason})", flush=True)
        if engine.graph is not None:
            print(
                f"decode graphs: {len(engine.graph.batch_sizes)}, the largest of {engine.graph.batch_sizes[-1]} requests",
                flush=True,
            )
    return engine, selection


def _quiet(ranks: Ranks) -> None:
    """One voice: no bars and notes of transformers', and from other ranks nothing but errors."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if not ranks.is_first:
        logging.disable(logging.WARNING)
