"""Options, start-up and engine, shared by the commands that run ranks."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING

from dcpmla.config import (
    DCP_COMM_BACKENDS,
    DCP_EXCHANGE_DTYPES,
    DECODE_QUERY_DTYPES,
    INDEX_CACHE_DTYPES,
    KV_CACHE_DTYPES,
    MODEL_DTYPES,
    DCPConfig,
)
from dcpmla.job.bootstrap import DEVICES
from dcpmla.job.join import TIMEOUT, Job, check_num_ranks, join_ranks
from dcpmla.job.launcher import LaunchInfo
from dcpmla.planning.capacity import FORMATS

if TYPE_CHECKING:  # these import transformers, which only commands that run a model need
    from dcpmla.comm.select import ChosenExchange
    from dcpmla.integrations.open_model import ModelFiles
    from dcpmla.runtime.engine import Engine

_NO_OPTIONS = ("decode_context_parallel_size", "context_workspace_tokens")  # fields of DCPConfig that are found apart


def add_engine_arguments(parser: argparse.ArgumentParser, dcp_sizes: Callable[[str], object] = int) -> None:
    """Add the options of a model, its layout and its engine; dcp_sizes reads the value of -dcp."""
    add = parser.add_argument
    add("--model", required=True, metavar="DIR_OR_ID", help="directory of a safetensors checkpoint, or a hub id")
    add("--revision", metavar="REV", help="branch, tag or commit of a hub id; default: its main branch")
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
    add(
        "--dcp-comm-backend",
        choices=DCP_COMM_BACKENDS,
        default="auto",
        help="the exchange; auto: direct where all ranks reach each other over NVLink, else a2a",
    )
    add(
        "--dcp-exchange-dtype",
        choices=DCP_EXCHANGE_DTYPES,
        default="auto",
        help="fp8: decode's rows travel as e4m3 (with direct only)",
    )
    add(
        "--dcp-exchange-timeout",
        dest="exchange_timeout",
        type=seconds,
        default=60,
        metavar="S",
        help="seconds that direct waits for a rank's part of an exchange",
    )
    add(
        "--dcp-check-exchange",
        dest="check_exchange",
        action="store_true",
        help="first compare the ranks' calls of the exchange: slow, for debugging",
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
        choices=(*KV_CACHE_DTYPES, "fp8_e4m3"),
        default="auto",
        help="format of the latent cache; auto: the model's dtype; fp8_e4m3: another name of fp8",
    )
    add(
        "--kv-cache-scale",
        type=float,
        metavar="X",
        help="what the values of an fp8 cache are multiplied by; default: the checkpoint's, or 1",
    )
    add(
        "--calculate-kv-scales",
        action="store_true",
        help="take the scales of fp8 caches and queries from the first prompts' values",
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
        help="format of sparse MLA's index cache; auto: the model's dtype",
    )
    add(
        "--index-hadamard",
        action="store_true",
        help="spread the values of the indexer's keys and queries before they are rounded",
    )
    add(
        "--attention-backend",
        default="auto",
        metavar="NAME",
        help="kernel of decode's attention (docs/kernels.md); auto: the first that can",
    )
    add("--prefill-backend", default="auto", metavar="NAME", help="kernel of prefill's attention, alike")
    add(
        "--enable-expert-parallel",
        action="store_true",
        help="spread experts whole over the ranks instead of cutting each",
    )
    add("--block-size", type=int, default=64, metavar="P", help="tokens of a cache block on one rank")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the cached blocks of earlier requests that begin with the same tokens",
    )
    add("--max-num-batched-tokens", type=positive, default=8192, metavar="C", help="most tokens of one step")
    add("--max-num-seqs", type=positive, default=256, metavar="R", help="most requests that run at the same time")
    add(
        "--max-prefill-ms",
        type=float,
        metavar="MS",
        help="most milliseconds, by the planner's model, that pieces of prompts take in a step in which requests "
        "decode; default: what a step of --max-num-batched-tokens tokens without context takes",
    )
    add("--max-model-len", type=int, metavar="L", help="longest sequence, prompt and answer; default: the model's")
    add(
        "--kv-cache-memory-bytes",
        type=positive,
        metavar="B",
        help="cache of one rank; default: what its requests need and memory allows",
    )
    add(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="F",
        help="part of the device's memory to use, in (0, 1]",
    )
    add("--dtype", choices=MODEL_DTYPES, default="auto", help="to compute in; auto: as stored, but not float16")
    add(
        "--expert-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="fp8: experts that are stored in e2m1 (DeepSeek-V4) in 8 bits, the same values: more memory, faster",
    )
    add(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights instead of a checkpoint's; the directory needs a config.json alone",
    )
    add(
        "--speculative-method",
        choices=("none", "ngram", "mtp"),
        default="none",
        help="drafts that a step verifies at once: ngram: what followed the last tokens before, for texts that repeat "
        "their prompt; mtp: the checkpoint's MTP module",
    )
    add("--num-speculative-tokens", type=positive, default=3, metavar="K", help="most drafts of a request in a step")
    add("--enforce-eager", action="store_true", help="no CUDA graphs of decode steps")
    add_job_arguments(parser)


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of any job of ranks."""
    add = parser.add_argument
    add("--device", choices=DEVICES, default="auto", help="auto: GPUs where any is seen")
    add(
        "--timeout",
        type=seconds,
        default=TIMEOUT,
        metavar="S",
        help="seconds in a step after which a rank counts as lost",
    )


@contextmanager
def start(args: argparse.Namespace) -> Iterator[Job]:
    """Run a block as `join` does, with -tp ranks.

    Raises:
        ValueError: The number of ranks is not -tp.
    """
    with join(args, partial(check_num_ranks, tensor_parallel_size=args.tensor_parallel_size)) as job:
        yield job


@contextmanager
def join(args: argparse.Namespace, check: Callable[[LaunchInfo], object] = lambda _: None) -> Iterator[Job]:
    """Run a block of a command among the ranks of its job (`join_ranks`)."""
    arguments = {name: value for name, value in vars(args).items() if name != "run"}
    with join_ranks(args.device, args.timeout, arguments, check) as job:
        yield job


def dcp_config(args: argparse.Namespace, decode_context_parallel_size: int) -> DCPConfig:
    """Make the layout that the options ask for, with one of their DCP sizes.

    Raises:
        ValueError: Sizes do not divide.
    """
    options = {field.name: getattr(args, field.name) for field in fields(DCPConfig) if field.name not in _NO_OPTIONS}
    return DCPConfig(decode_context_parallel_size=decode_context_parallel_size, **options)


def build_engine(
    args: argparse.Namespace, job: Job, dcp: DCPConfig, files: "ModelFiles", seq_lens: Sequence[int] | None
) -> "tuple[Engine, ChosenExchange]":
    """Load the model as the options say; rank 0 prints the outcome. Collective."""
    from dcpmla import llm
    from dcpmla.integrations.engine_options import EngineOptions

    engine, chosen = llm.build_engine(job, dcp, files, EngineOptions.of(vars(args)), seq_lens)
    if job.ranks.is_first:
        print(f"ranks: {job.ranks.origin}\ncache: {engine.cache.sizes}")
        print(f"exchange: {chosen.exchange.name} ({chosen.reason})", flush=True)
        if engine.graph is not None:
            sizes, wide = engine.graph.batch_sizes, engine.graph.wide_sizes
            of_drafts = f"; with drafts {len(wide)}, the largest of {wide[-1]}" if wide else ""
            print(f"decode graphs: {len(sizes)}, the largest of {sizes[-1]} requests{of_drafts}", flush=True)
    return engine, chosen


# ---- values of options, read for argparse


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> int:
    """Read a number of seconds, up to a week."""
    number = positive(text)
    if number > 604800:
        raise argparse.ArgumentTypeError(f"{text!r} is more than a week, 604800 seconds")
    return number


def positive_list(text: str) -> list[int]:
    """Read whole numbers of at least 1, separated by commas."""
    return [positive(item) for item in text.split(",")]


def share_list(text: str) -> list[float]:
    """Read numbers in [0, 1], separated by commas."""
    try:
        shares = [float(item) for item in text.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share <= 1 for share in shares):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers in [0, 1], as in 0,0.5,1")
    return shares


def name_list(text: str, choices: Sequence[str], kind: str) -> list[str]:
    """Read names separated by commas, each once."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in choices:
            raise argparse.ArgumentTypeError(f"{name!r} is not {kind}; choose from {', '.join(choices)}")
    return names


def format_list(text: str) -> list[str]:
    """Read cache formats separated by commas, each once; fp8_e4m3 is another name of fp8."""
    names = ("fp8" if name == "fp8_e4m3" else name for name in text.split(","))
    return name_list(",".join(names), FORMATS, "a cache format")


def exchange_list(text: str) -> list[str]:
    """Read names of exchanges separated by commas, each once."""
    return name_list(text, DCP_COMM_BACKENDS, "an exchange")


def token_ids(text: str) -> list[int]:
    """Read whole numbers separated by commas; the model checks later that they are tokens."""
    try:
        return [int(token) for token in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of token ids separated by commas, as in 5,6,7"
        ) from None


def seed(text: str) -> int:
    """Read a whole number in [0, 2^32)."""
    if not text.isdecimal() or int(text) >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in [0, 2^32)")
    return int(text)
