"""The installed package: its requirements, its version, and an import without side effects."""

import itertools
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version

from packaging.requirements import Requirement

import dcpmla
from tests.support.sources import CORE, FILES, PACKAGE, ROOMS, metadata, packages_of, room


def test_importing_leaves_the_process_as_it_was() -> None:
    """torch comes first: its effects on a process are not this package's."""
    script = """
import json, logging, os, sys, threading, torch, torch.distributed
def state():
    return {
        "environment": dict(os.environ),
        "cuda": torch.cuda.is_initialized(),
        "process group": torch.distributed.is_initialized(),
        "dtype": str(torch.get_default_dtype()),
        "seed": torch.random.initial_seed(),
        "rng": torch.random.get_rng_state().tolist(),
        "gradients": torch.is_grad_enabled(),
        "num threads": torch.get_num_threads(),
        "path": list(sys.path),
        "logging": (logging.root.level, len(logging.root.handlers), logging.root.manager.disable),
        "threads": threading.active_count(),
    }
before = state()
import dcpmla
after = state()
changed = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
print(json.dumps([changed, sorted(name for name in sys.modules if name.startswith("dcpmla."))]))
"""
    # A variable that the import sets is set in this process already, and would be inherited: hand down what Python
    # needs, no more.
    environment = {
        key: os.environ[key] for key in ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH") if key in os.environ
    }
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    changed, imported = json.loads(result.stdout)
    assert changed == {}
    assert not [name for name in imported if ROOMS[room(name)] > CORE], "rings are imported on demand"


def test_types_are_for_users_too() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_what_is_imported_is_declared() -> None:
    distributions = {
        "huggingface_hub": "huggingface-hub",
        "fla": "fla-core",
        "pynvml": "nvidia-ml-py",
        "prometheus_client": "prometheus-client",
        "nixl_cu12": "nixl-cu12",
        "zmq": "pyzmq",
    }
    optional = {"flashinfer"}  # used if it is installed
    declared = [*metadata()["dependencies"], *itertools.chain(*metadata()["optional-dependencies"].values())]
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in declared}
    imported = {name for module in FILES for name in packages_of(module)}
    missing = {distributions.get(name, name) for name in imported - optional} - names
    assert not missing


def test_the_core_is_what_an_installation_without_extras_brings() -> None:
    assert {Requirement(text).name for text in metadata()["dependencies"]} == {"torch", "triton", "numpy"}


def test_what_is_installed_is_what_is_declared() -> None:
    """Upper bounds hold, too: nothing is newer than the tested releases."""
    texts = [*metadata()["dependencies"], *metadata()["optional-dependencies"]["engine"]]
    requirements = [Requirement(text) for text in texts]
    assert {"torch", "numpy", "transformers"} <= {requirement.name for requirement in requirements}
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate():
            assert requirement.specifier.contains(version(requirement.name), prereleases=True), requirement


def test_the_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", dcpmla.__version__)
