"""Ranks of vLLM on CPUs that fork from a process which has imported it: the import takes 17 of a rank's seconds."""

import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from tests.engines.trees import VERSIONS, vllm_tree, vllm_variables
from tests.support import ranks
from tests.support.launchers import ROOT, Ended, run_forked, unattended

_IMPORTED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "dcpmla.attention.mla.layer",
    "tests.support.preloaded",
)


def run_engine_ranks(tree: Path, program: str, num_ranks: int, *arguments: object, **variables: str) -> Ended:
    """Run a program of this folder on ranks of a job, as torchrun would, with a vLLM from its tree; return what the
    first rank printed.

    Raises:
        AssertionError: a rank failed, or 500 seconds ran out.
    """
    commands = unattended([ROOT / "tests" / "engines" / program, *arguments], num_ranks)
    # vLLM inspects models in processes of their own, which read PYTHONPATH. The server below knows no test's name.
    shared = vllm_variables(tree) | {"PYTEST_CURRENT_TEST": os.environ.get("PYTEST_CURRENT_TEST", "")}
    commands = [(argv, {**shared, **own, **variables}) for argv, own in commands]
    first, *_ = _server(tree).submit(run_forked, commands, timeout=500).result()
    return first


def report_of(
    program: str, num_ranks: int, model: Path, options: dict[str, Any], tree: Path | None = None, **variables: str
) -> tuple[Any, str]:
    """Run a program with a model and options (`run_engine_ranks`), in the last version of vLLM or that of a tree;
    return the line of JSON that it printed last, and its stderr.
    """
    tree = tree or vllm_tree(VERSIONS[-1])
    ended = run_engine_ranks(tree, program, num_ranks, model, json.dumps(options), **variables)
    return json.loads(ended.stdout.splitlines()[-1]), ended.stderr


@cache
def _server(tree: Path) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _choose_imports, (vllm_variables(tree),))


def _choose_imports(variables: dict[str, str]) -> None:
    os.environ.update(variables)  # The server inherits it.
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)  # Ranks get this process's.
    ranks._CONTEXT.set_forkserver_preload(list(_IMPORTED))
