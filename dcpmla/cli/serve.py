"""Serve a model over HTTP in OpenAI's API, with the latent cache sharded over the ranks of the job."""

import argparse
import gc
import logging
import os
import re
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from dcpmla.cli.engine_arguments import add_engine_arguments
from dcpmla.cli.options import build_engine, dcp_config, positive, seconds, start
from dcpmla.config import DCPConfig
from dcpmla.extras import needed_by
from dcpmla.integrations.open_model import check_layout, open_model
from dcpmla.integrations.tokenizer import check_template_sandbox
from dcpmla.integrations.transfers import ROLES, check_role, link_engine
from dcpmla.job.bootstrap import agree
from dcpmla.job.join import LOAD_TIMEOUT
from dcpmla.job.launcher import claimed_rank
from dcpmla.serving.chat.formats import FORMATS
from dcpmla.serving.frontend import Frontend, listen
from dcpmla.serving.loop import ServingLoop, started

_KEY, _TRANSFER_KEY = "DCPMLA_API_KEY", "DCPMLA_TRANSFER_KEY"
_LOOPBACK = "localhost", "127.0.0.1", "[::1]"  # names in requests
_logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `serve`."""
    parser.set_defaults(run=run)
    add_engine_arguments(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on, of the first rank's host; 0.0.0.0: all it has")
    add("--port", type=_port, default=8000, metavar="P", help="0: any that is free")
    add("--served-model-name", metavar="NAME", help="the model's name for clients; default: --model as it is given")
    template = "file of a chat template, in place of the model's, on the first rank's host"
    add("--chat-template", metavar="FILE", help=template)
    role = "prefill: compute prompts for servers with --role decode (docs/disaggregation.md); both: serve alone"
    formats = "format of answers, in place of the model's: " + ", ".join(FORMATS)
    add("--tool-call-parser", choices=FORMATS, metavar="NAME", help=f"{formats}; for tool calls")
    add("--reasoning-parser", choices=FORMATS, metavar="NAME", help="the same, for reasoning")
    add("--role", choices=ROLES, default="both", help=role)
    servers = "servers with --role prefill that compute prompts for this one, with --role decode"
    add("--prefill-servers", nargs="+", type=_url, default=[], metavar="URL", help=servers)
    add("--api-key", metavar="KEY", help=f"that clients must give; default: the variable {_KEY}, else none")
    transfer = "that servers with --role prefill and --role decode have in common, and clients have not"
    add("--transfer-key", metavar="KEY", help=f"{transfer}; default: the variable {_TRANSFER_KEY}, else none")
    origins = "origins whose web pages may use the server, such as https://chat.example; *: any, the default with a key"
    add("--allowed-origins", nargs="+", type=_origin, metavar="ORIGIN", help=origins)
    add("--max-waiting", type=positive, default=1024, metavar="N", help="most requests beyond those that run; then 429")
    add("--request-timeout", type=seconds, default=3600, metavar="S", help="seconds that one request may take")
    add("--drain-seconds", type=seconds, default=25, metavar="S", help="seconds for running requests after a SIGTERM")


def run(args: argparse.Namespace) -> None:
    """Load the model and serve it until SIGTERM or SIGINT.

    Every rank calls it; the first one listens.
    """
    dcp = dcp_config(args, args.decode_context_parallel_size)
    api_key, transfer_key = _take_key(args, "api_key", _KEY), _take_key(args, "transfer_key", _TRANSFER_KEY)
    _check_role(args, dcp)
    frontend = _start_frontend(args, api_key, transfer_key)
    with start(args) as job, ExitStack() as to_close:
        job.watchdog.enter("reading the model's files", LOAD_TIMEOUT)
        with agree():
            files = open_model(args.model, args.max_model_len, args.revision)
            check_layout(files, dcp)
        engine, _ = build_engine(args, job, dcp, files, None)
        to_close.callback(engine.close)
        link = None
        if args.role != "both":
            job.watchdog.enter("connecting to the network of transfers", LOAD_TIMEOUT)
            if not _hosts_outside(args) and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
                os.environ.setdefault("UCX_NET_DEVICES", "lo")  # UCX listens for this host's servers alone
            with needed_by(f"--role {args.role}"):
                link = link_engine(engine, files, dcp, args.role)
        loop = ServingLoop(engine, frontend)
        job.watchdog.on_stop(loop.stop)
        if frontend is not None:
            frontend.start()
            frontend.send(started(engine, files, link))
            print(f"serving on {frontend.address}", flush=True)
        # Garbage collection skips all objects loaded so far: a pass takes 0.2 s and more, and all ranks wait.
        gc.collect()
        gc.freeze()
        to_close.callback(gc.unfreeze)  # else libraries report the remaining objects as leaked at the end
        job.watchdog.enter("waiting for the first request")
        loop.run()


def _take_key(args: argparse.Namespace, name: str, variable: str) -> str | None:
    """Return a key from the options or the environment, None without one, and remove it from the options, which ranks
    compare, and of which they print differences.

    Raises:
        ValueError: The key is empty.
    """
    key: str | None = vars(args).pop(name)
    key = os.environ.get(variable) if key is None else key
    if key == "":
        option = f"--{name.replace('_', '-')}"
        raise ValueError(f"{name} ({option}, {variable}) is empty; give a key, or leave it out")
    return key


def _check_role(args: argparse.Namespace, dcp: DCPConfig) -> None:
    """Raise ValueError for a role that lacks its servers, has none to use, or cannot exchange blocks."""
    if (args.role == "decode") != bool(args.prefill_servers):
        raise ValueError(
            f"role (--role) is {args.role} and prefill_servers (--prefill-servers) is {args.prefill_servers}; "
            "a server with --role decode needs --prefill-servers, and no other server has them"
        )
    check_role(args.role, dcp)


def _check_keys(args: argparse.Namespace, api_key: str | None, transfer_key: str | None) -> None:
    """Check that clients cannot act as servers that exchange blocks. Inside of one host a warning is enough.

    Raises:
        ValueError: A server that other hosts reach, or that reaches other hosts, has no transfer key; or clients have
            the same key.
    """
    label = f"transfer_key (--transfer-key, {_TRANSFER_KEY})"
    if transfer_key is not None and transfer_key == api_key:
        raise ValueError(f"{label} is the API key (--api-key, {_KEY}), which clients have; give another one")
    if args.role == "both" or transfer_key is not None:
        return
    if outside := _hosts_outside(args):
        raise ValueError(
            f"{label} is missing; role (--role) is {args.role}, and {outside[0]} (--host, --prefill-servers) is no "
            "loopback address; give the prefill and the decode servers one key, which no client has"
        )
    _logger.warning(
        "role (--role) is %s without a key of servers (--transfer-key, %s): %s can exchange blocks as a server",
        args.role,
        _TRANSFER_KEY,
        "whoever reaches the port" if api_key is None else "each client",
    )


def _hosts_outside(args: argparse.Namespace) -> list[str]:
    """Return the hosts with which a server exchanges blocks and that are not this one."""
    hosts = [args.host, *(urlsplit(url).hostname or "" for url in args.prefill_servers)]
    return [host for host in hosts if not _is_loopback(host)]


def _is_loopback(host: str) -> bool:
    """Return whether a name or an address is one that other hosts do not reach. No name server is asked."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _start_frontend(args: argparse.Namespace, api_key: str | None, transfer_key: str | None) -> Frontend | None:
    """Start the HTTP process of the first rank, before this process has threads.

    Raises:
        ValueError: The address is taken or not this host's, or a key is missing.
    """
    if claimed_rank(os.environ) not in (None, "0"):
        return None
    from dcpmla.serving.http import serve_http  # starlette and uvicorn are needed on this rank alone
    from dcpmla.serving.settings import Settings

    _check_keys(args, api_key, transfer_key)
    check_template_sandbox()
    settings = Settings(
        args.served_model_name or args.model,
        api_key,
        args.request_timeout,
        args.allowed_origins or (() if api_key is None else ("*",)),
        _read_template(args.chat_template),
        args.tool_call_parser,
        args.reasoning_parser,
        args.role,
        args.prefill_servers,
        transfer_key,
        (*_LOOPBACK, args.host.lower()) if _is_loopback(args.host) else (),
    )
    listener = listen(args.host, args.port)
    with listener:
        serve = partial(
            serve_http,
            listener=listener,
            settings=settings,
            max_waiting=args.max_waiting,
            drain_seconds=args.drain_seconds,
        )
        return Frontend(serve, listener)


def _read_template(path: str | None) -> str | None:
    """Read a chat template.

    Raises:
        ValueError: The file cannot be read, or is empty.
    """
    if path is None:
        return None
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template (--chat-template) is {path!r}, which cannot be read: {error}") from error
    if not text.strip():
        raise ValueError(f"chat_template (--chat-template) is {path!r}, which is empty")
    return text


def _url(text: str) -> str:
    """Read the URL of a server."""
    if not re.fullmatch(r"https?://[^/?#\s]+/?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a server's URL, like http://10.0.0.2:8001")
    return text.rstrip("/")


def _origin(text: str) -> str:
    """Read an origin: a scheme, a host and maybe a port."""
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no origin; give * or one such as https://chat.example:8443")
    return text


def _port(text: str) -> int:
    """Read a port's number."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port in [0, 65535]")
    return int(text)
