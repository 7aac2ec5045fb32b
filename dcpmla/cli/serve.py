"""Serve a model over HTTP in OpenAI's API, with the latent cache sharded over the ranks of the job."""

import argparse
import gc
import json
import logging
import os
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dcpmla.cli.field_options import add_fields, values_of
from dcpmla.cli.options import add_engine_arguments, build_engine, dcp_config, renamed, start
from dcpmla.cli.vllm_arguments import add_speculative_config, plain_arguments
from dcpmla.cli.vllm_options import add_vllm_options, check_quantization, check_vllm_options
from dcpmla.config import DCPConfig
from dcpmla.extras import needed_by
from dcpmla.integrations.open_model import check_layout, open_model
from dcpmla.integrations.tokenizer import check_template_sandbox
from dcpmla.integrations.transfers import check_role, link_engine, new_staging
from dcpmla.job.bootstrap import agree
from dcpmla.job.join import LOAD_TIMEOUT
from dcpmla.job.launcher import claimed_rank
from dcpmla.serving.frontend import Frontend, listen
from dcpmla.serving.kv_events import EventsConfig
from dcpmla.serving.loop import ServingLoop, started
from dcpmla.serving.messages import Opened
from dcpmla.serving.settings import ServeOptions, Settings, is_loopback

if TYPE_CHECKING:
    from dcpmla.__main__ import Parser
    from dcpmla.serving.kv_publisher import EventPublisher  # It needs the extra `events`.

_KEY, _TRANSFER_KEY = "DCPMLA_API_KEY", "DCPMLA_TRANSFER_KEY"
_ALIASES = {"disable_access_log": "--disable-uvicorn-access-log"}  # vLLM's other names of options
_REASONING_PARSERS = {"deepseek_r1": "deepseek_v3"}  # other names of formats
_logger = logging.getLogger(__name__)


def add_arguments(parser: "Parser") -> None:
    """Add the options of `serve`, and vLLM's."""
    parser.set_defaults(run=run)
    add_engine_arguments(parser)
    changes: dict[str, dict[str, Any]] = {
        "kv_events_config": {"type": _read_events_config, "metavar": "JSON"},
        "default_chat_template_kwargs": {"type": _read_object, "metavar": "JSON"},
        "reasoning_parser": {"type": renamed(_REASONING_PARSERS)},
    }
    add_fields(parser, ServeOptions, "server", changes=changes, aliases=_ALIASES)
    add_speculative_config(parser)
    text = "method of the checkpoint's quantization, for the check that it has that one"
    parser.add_argument("--quantization", "-q", metavar="METHOD", help=text)
    add_vllm_options(parser)
    parser.rewrite = plain_arguments


def run(args: argparse.Namespace) -> None:
    """Load the model and serve it until SIGTERM or SIGINT.

    Every rank calls it; the first one listens.
    """
    dcp = dcp_config(args, args.decode_context_parallel_size)
    options, notes = _take_options(args), [*check_vllm_options(args.vllm_options, args.model)]
    _check_role(options, dcp)
    _set_up_log(options.log_level)
    frontend = _start_frontend(options, args.model)
    publisher = None if frontend is None else _start_publisher(options.kv_events_config)
    for note in notes if frontend is not None else ():
        _logger.warning("%s", note)
    with start(args) as job, ExitStack() as to_close:
        if publisher is not None:
            to_close.callback(publisher.close)
        job.watchdog.enter("reading the model's files", LOAD_TIMEOUT)
        with agree():
            files = open_model(args.model, args.max_model_len, args.revision)
            check_layout(files, dcp)
            check_quantization(args.quantization, files.config)
        start_time = time.monotonic()
        if frontend is not None:
            frontend.start()
            frontend.send(Opened(str(files.directory)))
            _logger.info("loading %s", files.directory)
        is_within_host = not _hosts_outside(options) and job.ranks.num_local_ranks == job.ranks.num_ranks
        staging = None if options.role == "both" else new_staging(job.ranks.device, is_within_host)
        engine, _ = build_engine(args, job, dcp, files, None, _logger.info)
        to_close.callback(engine.close)
        link = None
        if staging is not None:
            job.watchdog.enter("connecting to the network of transfers", LOAD_TIMEOUT)
            if is_within_host:
                os.environ.setdefault("UCX_NET_DEVICES", "lo")  # UCX listens for this host's servers alone
            with needed_by(f"--role {options.role}"):
                link = link_engine(engine, files, options.role, staging)
        loop = ServingLoop(engine, frontend, publisher)
        job.watchdog.on_stop(loop.stop)
        if frontend is not None:
            message = started(engine, files, link)
            if message.no_grammars:
                _logger.info("structured output: none; %s", message.no_grammars)
            frontend.send(message)
            _logger.info("ready %.1f s later", time.monotonic() - start_time)
        # Garbage collection skips all objects loaded so far: a pass takes 0.2 s and more, and all ranks wait.
        gc.collect()
        gc.freeze()
        to_close.callback(gc.unfreeze)  # else libraries report the remaining objects as leaked at the end
        job.watchdog.enter("waiting for the first request")
        loop.run()


def _take_options(args: argparse.Namespace) -> ServeOptions:
    """Return the server's options, with keys from the environment. Remove the keys from `args`: ranks compare those and
    print differences.

    Raises:
        ValueError: A key is empty.
    """
    values = values_of(ServeOptions, args)
    for name, variable in (("api_key", _KEY), ("transfer_key", _TRANSFER_KEY)):
        key = vars(args).pop(name)
        values[name] = os.environ.get(variable) if key is None else key
        if values[name] == "":
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{name} ({option}, {variable}) is empty; give a key, or leave it out")
    return ServeOptions(**values)


def _set_up_log(level: str) -> None:
    """Write the package's log to standard error: the first rank from a level on, other ranks their warnings. Libraries
    have their own warnings, too.
    """
    rank = claimed_rank(os.environ) or "0"
    of_rank = "" if rank == "0" else f"rank {rank}: "
    logging.basicConfig(format=f"%(asctime)s %(levelname)s {of_rank}%(message)s")
    lowest = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(max(lowest, logging.WARNING))
    logging.getLogger("dcpmla").setLevel(lowest if rank == "0" else max(lowest, logging.WARNING))


def _check_role(options: ServeOptions, dcp: DCPConfig) -> None:
    """Raise ValueError for a role that lacks its servers, has none to use, or cannot exchange blocks."""
    if (options.role == "decode") != bool(options.prefill_servers):
        raise ValueError(
            f"role (--role) is {options.role} and prefill_servers (--prefill-servers) is {options.prefill_servers}; "
            "a server with --role decode needs --prefill-servers, and no other server has them"
        )
    check_role(options.role, dcp)


def _check_keys(options: ServeOptions) -> None:
    """Check that clients cannot act as servers that exchange blocks. Inside of one host a warning is enough.

    Raises:
        ValueError: A server that other hosts reach, or that reaches other hosts, has no transfer key; or clients have
            the same key.
    """
    label = f"transfer_key (--transfer-key, {_TRANSFER_KEY})"
    if options.transfer_key is not None and options.transfer_key == options.api_key:
        raise ValueError(f"{label} is the API key (--api-key, {_KEY}), which clients have; give another one")
    if options.role == "both" or options.transfer_key is not None:
        return
    if outside := _hosts_outside(options):
        raise ValueError(
            f"{label} is missing; role (--role) is {options.role}, and {outside[0]} (--host, --prefill-servers) is no "
            "loopback address; give the prefill and the decode servers one key, which no client has"
        )
    _logger.warning(
        "role (--role) is %s without a key of servers (--transfer-key, %s): %s can exchange blocks as a server",
        options.role,
        _TRANSFER_KEY,
        "whoever reaches the port" if options.api_key is None else "each client",
    )


def _hosts_outside(options: ServeOptions) -> list[str]:
    """Return the hosts with which a server exchanges blocks and that are not this one."""
    hosts = [options.host, *(urlsplit(url).hostname or "" for url in options.prefill_servers)]
    return [host for host in hosts if not is_loopback(host)]


def _start_frontend(options: ServeOptions, model: str) -> Frontend | None:
    """Start the HTTP process of the first rank, before this process has threads.

    Args:
        model: Model's directory or hub id.
    Raises:
        ValueError: The address is taken or not this host's, a key is missing, or the chat template cannot be read.
    """
    if claimed_rank(os.environ) not in (None, "0"):
        return None
    from dcpmla.serving.http import serve_http  # starlette and uvicorn are needed on this rank alone

    _check_keys(options)
    check_template_sandbox()
    name, template = [*options.served_model_name, model][0], _read_template(options.chat_template)
    settings = Settings(**vars(options), name=name, template=template)
    with listen(options.host, options.port) as listener:
        return Frontend(partial(serve_http, listener=listener, settings=settings), listener)


def _start_publisher(config: EventsConfig | None) -> "EventPublisher | None":
    """Start the publisher of the cache's changes, if the config asks for one.

    Raises:
        ValueError: ZeroMQ does not take an address, or the extra `events` is not installed.
    """
    if config is None or not config.is_enabled:
        return None
    with needed_by("kv_events_config (--kv-events-config)"):
        from dcpmla.serving.kv_publisher import EventPublisher

    publisher = EventPublisher(config)
    print(f"publishing KV events at {publisher.address}", flush=True)
    return publisher


def _read_events_config(text: str) -> EventsConfig:
    """Read `--kv-events-config` for argparse."""
    try:
        return EventsConfig.read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _read_object(text: str) -> dict[str, Any]:
    """Read a JSON object for argparse."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _read_template(path: str | None) -> str | None:
    """Read a chat template: a file, or its text as vLLM takes it, which has a brace.

    Raises:
        ValueError: The file cannot be read, or is empty.
    """
    if path is None or "{" in path:
        return path
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template (--chat-template) is {path!r}, which cannot be read: {error}") from error
    if not text.strip():
        raise ValueError(f"chat_template (--chat-template) is {path!r}, which is empty")
    return text
