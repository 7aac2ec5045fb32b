"""Adapters of others' kernels (peers), which the package's benchmarks time with --peers."""

import importlib.util
from pathlib import Path
from typing import Any


def import_file(path: Path) -> Any:
    """Return the module in a file, which need not be on sys.path."""
    spec = importlib.util.spec_from_file_location(f"dcpmla_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
