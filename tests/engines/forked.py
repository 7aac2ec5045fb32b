"""Ranks of vLLM on CPUs that fork from a process which has imported it: the import takes 17 of a rank's seconds."""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

from tests.engines.trees import vllm_variables
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


@cache
def _server(tree: Path) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _choose_imports, (vllm_variables(tree),))


def _choose_imports(variables: dict[str, str]) -> None:
    os.environ.update(variables)  # The server inherits it.
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)  # Ranks get this process's.
    ranks._CONTEXT.set_forkserver_preload(list(_IMPORTED))
