"""Observation of a recorded run of tests: Python imports this file as each process starts, when its folder is on
PYTHONPATH. It does nothing without DCPMLA_OBSERVATIONS, the folder that takes what is observed.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _run_next() -> None:
    """Run the file of this name that Python would find without this folder: SGLang's tests have one."""
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if Path(path).resolve() != _HERE])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


_run_next()
if os.environ.get("DCPMLA_OBSERVATIONS"):
    import observe_features

    observe_features.install()
