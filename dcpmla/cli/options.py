"""Options, start-up and engine, shared by the commands that run ranks: a model's source, its layout (`DCPConfig`), its
engine (`EngineOptions`).
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from dcpmla.cli.field_options import add_fields, list_reader, reader, values_of
from dcpmla.config import KV_CACHE_ALIASES, KV_CACHE_DTYPES, DCPConfig
from dcpmla.fields import Rule, is_whole, number, whole
from dcpmla.integrations.arguments import layout
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.job.bootstrap import DEVICES
from dcpmla.job.hosts import Hosts
from dcpmla.job.join import TIMEOUT, Job, check_num_ranks, join_ranks
from dcpmla.job.launch_info import LaunchInfo
from dcpmla.job.launcher import PARENT, is_started
from dcpmla.job.local_ranks import run_local_ranks
from dcpmla.planning.capacity import FORMATS

# Fields of `DCPConfig` that `add_fields` does not add: two have options of their own, and the third has none.
_APART = ("tensor_parallel_size", "decode_context_parallel_size", "context_workspace_tokens")
_OWN = ("run", "launch", "node_rank", "master_addr")  # arguments that may differ between ranks

# vLLM's other names of options and of their values.
_ALIASES = {
    "cp_kv_cache_interleave_size": "--dcp-kv-cache-interleave-size",
    "enable_expert_parallel": "-ep",
    "gpu_memory_utilization": "--device-memory-utilization",
    "speculative_method": "--spec-method",
    "speculative_model": "--spec-model",
    "num_speculative_tokens": "--spec-tokens",
}
_DTYPES = {"half": "float16", "float": "float32"}
_LOAD_FORMATS = dict.fromkeys(("safetensors", "fastsafetensors", "instanttensor", "runai_streamer"), "auto")

if TYPE_CHECKING:  # these import transformers, which only commands that run a model need
    from dcpmla.comm.select import ChosenExchange
    from dcpmla.integrations.open_model import ModelFiles
    from dcpmla.runtime.engine import Engine


def add_model(
    parser: argparse.ArgumentParser, text: str, type: Callable[[str], Any] = str, is_required: bool = True
) -> None:
    """Add the model as a positional argument, and as --model.

    Args:
        text: Help of the argument.
        type: Function that reads the value.
        is_required: Whether the model must be given.
    """
    # Not `nargs="?"`: argparse would take the argument for missing where an option comes before it.
    parser.add_argument("model", metavar="MODEL", type=type, help=text).required = is_required
    parser.add_argument("--model", metavar="MODEL", type=type, help="the same")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model, its layout and its engine."""
    add = parser.add_argument
    add_model(parser, "directory of a safetensors checkpoint, or a hub id")
    add("--revision", metavar="REV", help="branch, tag or commit of a hub id; default: its main branch")
    tp = "ranks that cut the heads; all ranks of the job"
    add("-tp", "--tensor-parallel-size", type=int, default=1, metavar="N", help=tp)
    dcp = "ranks that share one cache; divides -tp"
    add("-dcp", "--decode-context-parallel-size", type=int, default=1, metavar="D", help=dcp)
    add("--max-model-len", type=int, metavar="L", help="longest sequence, prompt and answer; default: the model's")
    names = [field.name for field in fields(DCPConfig) if field.name not in _APART]
    options = {"exchange_timeout": "--dcp-exchange-timeout", "check_exchange": "--dcp-check-exchange"}
    changes: dict[str, dict[str, Any]] = {
        "exchange_timeout": {"type": seconds, "metavar": "S"},
        "block_size": {"type": int},  # the dataclass checks it
        "kv_cache_dtype": {"choices": (*KV_CACHE_DTYPES, *KV_CACHE_ALIASES)},
        "dtype": {"type": renamed(_DTYPES)},
        "load_format": {"type": renamed(_LOAD_FORMATS)},
    }
    add_fields(parser, DCPConfig, "layout of the cache", names, options, changes, _ALIASES)
    add_fields(parser, EngineOptions, "engine", changes=changes, aliases=_ALIASES)
    parser.set_defaults(cp_kv_cache_interleave_size=None)  # it depends on other options (`layout`)
    add_job_arguments(parser)
    add_host_arguments(parser)


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of any job of ranks."""
    add = parser.add_argument
    add("--device", choices=DEVICES, default="auto", help="auto: GPUs where any is seen")
    timeout = "seconds in a step after which a rank counts as lost"
    add("--timeout", type=seconds, default=TIMEOUT, metavar="S", help=timeout)


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Add -tp and its hosts to a command that any number of ranks can run."""
    words = "ranks, which the command starts; without it those that a launcher has started, or one"
    parser.add_argument("-tp", "--tensor-parallel-size", type=positive, metavar="N", help=words)
    add_host_arguments(parser)


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a job of -tp ranks that the command starts itself where no launcher has."""
    add_fields(parser, Hosts, "hosts")
    parser.set_defaults(launch=launch)


def launch(args: argparse.Namespace) -> int | None:
    """Run this program again for each rank of this host, unless it is one rank or a launcher has started the ranks.

    Returns:
        The exit code; None where this process is a rank.
    Raises:
        ValueError: Options of hosts that contradict each other or -tp, or that a launcher's ranks do not need.
        ConnectionError: The port where the ranks meet is taken.
    """
    hosts, num_ranks = Hosts(**values_of(Hosts, args)), args.tensor_parallel_size or 1
    if is_started(os.environ, hosts.nnodes):
        if hosts != Hosts() and PARENT not in os.environ:
            raise ValueError(
                f"nnodes (--nnodes) is {hosts.nnodes}, node_rank (--node-rank) {hosts.node_rank}, but a launcher has "
                "started this rank; give the hosts to the launcher alone"
            )
        return None
    hosts.check_ranks(num_ranks)
    return run_local_ranks(num_ranks, hosts) if num_ranks > 1 else None


def start(args: argparse.Namespace) -> AbstractContextManager[Job]:
    """Return the context of a block that runs as in `join`, with -tp ranks if the option is given.

    Raises:
        ValueError: The number of ranks is not -tp.
    """
    return join(args, partial(check_num_ranks, tensor_parallel_size=args.tensor_parallel_size))


def join(
    args: argparse.Namespace, check: Callable[[LaunchInfo], object] = lambda _: None
) -> AbstractContextManager[Job]:
    """Return the context of a block of a command among the ranks of its job (`join_ranks`)."""
    arguments = {name: value for name, value in vars(args).items() if name not in _OWN}
    return join_ranks(args.device, args.timeout, arguments, check)


def dcp_config(args: argparse.Namespace, decode_context_parallel_size: int) -> DCPConfig:
    """Make the layout that the options ask for, with one of their DCP sizes.

    Raises:
        ValueError: Sizes do not divide.
    """
    given = {name: value for name, value in vars(args).items() if value is not None}
    return layout(given, args.tensor_parallel_size, decode_context_parallel_size)


def build_engine(
    args: argparse.Namespace,
    job: Job,
    dcp: DCPConfig,
    files: "ModelFiles",
    seq_lens: Sequence[int] | None,
    say: Callable[[str], object] | None = None,
) -> "tuple[Engine, ChosenExchange]":
    """Load the model as the options say; rank 0 says the outcome. Collective.

    Args:
        seq_lens: Lengths of all sequences, if known (`load_engine`).
        say: Function of a line; None prints it.
    """
    from dcpmla import llm
    from dcpmla.cli.start_report import start_lines

    options = EngineOptions.of(vars(args))
    engine, chosen = llm.build_engine(job, dcp, files, options, seq_lens)
    if job.ranks.is_first:
        for line in start_lines(job, files, engine, chosen, options, seq_lens is not None):
            print(line, flush=True) if say is None else say(line)
    return engine, chosen


# ---- values of options, read for argparse


positive = reader(whole(1))
seconds = reader(whole(1, 7 * 24 * 3600))  # up to a week
seed = reader(Rule("a whole number in [0, 2^32)", whole(0, (1 << 32) - 1).holds))
positive_list = list_reader(whole(1))
share_list = list_reader(number(0, 1), float)
# The model checks later that they are tokens.
token_ids = list_reader(Rule("a token id; give whole numbers separated by commas, as in 5,6,7", is_whole))


def name_list(text: str, choices: Sequence[str], kind: str) -> list[str]:
    """Read names separated by commas, each once."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in choices:
            allowed = ", ".join(choice or "an empty name" for choice in choices)
            raise argparse.ArgumentTypeError(f"{name!r} is not {kind}; choose from {allowed}")
    return names


def renamed(names: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that reads a value for argparse, and replaces vLLM's names by the ones here."""
    return lambda text: names.get(text, text)


def format_list(text: str) -> list[str]:
    """Read cache formats separated by commas, each once, also under vLLM's names."""
    names = (KV_CACHE_ALIASES.get(name, name) for name in text.split(","))
    return name_list(",".join(names), FORMATS, "a cache format")
