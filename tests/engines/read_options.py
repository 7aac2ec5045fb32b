"""A command that starts an engine's server, run up to there: FOLDER COMMAND..., in a folder that holds the model.

The engine's own program reads the options and checks them against the model's config; in place of the server, what it
has understood is printed as a line of JSON.
"""

import argparse
import json
import os
import runpy
import sys
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any


def main(folder: str, command: list[str]) -> None:
    os.chdir(folder)
    match command:
        case ["vllm", *arguments]:
            run_vllm(arguments)
        case ["python", "-m", "sglang.launch_server", *arguments]:
            run_sglang(arguments)
        case _:
            raise ValueError(f"{command} starts no engine that is known here")


def run_vllm(arguments: list[str]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli import serve

    async def report(args: argparse.Namespace) -> None:
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        parallel, backend = config.parallel_config, config.attention_config.backend.get_path()
        write(
            tp=parallel.tensor_parallel_size,
            dcp=parallel.decode_context_parallel_size,
            backend=backend,
            options=serve.make_arg_parser(serve.FlexibleArgumentParser()),
        )

    serve.run_server = report
    (script,) = entry_points(group="console_scripts", name="vllm")
    sys.argv = ["vllm", *arguments]
    script.load()()


def run_sglang(arguments: list[str]) -> None:
    def report(server_args: Any) -> None:
        from sglang.srt.arg_groups.overrides import resolving_view
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.server_args import ServerArgs

        resolved, parser = resolving_view(server_args), argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        backend = ATTENTION_BACKENDS[resolved.attention_backend]
        write(tp=resolved.tp_size, dcp=resolved.dcp_size, backend=backend.__module__, options=parser)

    server = ModuleType("sglang.srt.entrypoints.http_server")
    server.launch_server = report  # type: ignore[attr-defined]
    sys.modules[server.__name__] = server
    sys.argv = ["sglang.launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def write(options: argparse.ArgumentParser, **understood: Any) -> None:
    print(json.dumps(understood | {"options": list(options._option_string_actions)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
