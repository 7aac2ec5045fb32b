"""Kernels of others (peers), compared with ours by benchmarks; `benchmarks/peers/` of a checkout has their adapters."""

import importlib
from pathlib import Path
from typing import Any, NamedTuple

from dcpmla.bench.decode_inputs import DecodeCase, MakeKernel
from dcpmla.bench.results import leave_out


class Formats(NamedTuple):
    """Formats of the cache and of the queries that a peer reads."""

    kv_cache_dtype: str = "bf16"
    decode_query_dtype: str = "auto"

    def match(self, case: DecodeCase) -> bool:
        """Return whether a case has these formats."""
        return self == (case.kv_cache_dtype, case.decode_query_dtype)


PEERS = {  # decode kernels
    "flashmla": Formats(),
    "fa3": Formats(),
    "flashinfer": Formats(),
    "flashmla-fp8": Formats("fp8", "fp8"),
    "flashmla-sparse": Formats("fp8_ds_mla"),
}


def load_adapters(name: str) -> Any:
    """Return a module of `benchmarks.peers`.

    Raises:
        ValueError: The command does not run in a checkout.
    """
    try:
        return importlib.import_module(f"benchmarks.peers.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("benchmarks", "benchmarks.peers"):
            raise
        reason = "--peers needs the folder benchmarks/ of a checkout, which Python does not find"
        raise ValueError(f"{reason}; run python -m dcpmla in the checkout, or put it on PYTHONPATH") from error


def load_peer(name: str, directory: Path) -> MakeKernel | None:
    """Return the maker of a decode kernel, None where it cannot be loaded; print the reason."""
    with leave_out(name):
        return load_adapters("attention").load_kernel(name, directory)
    return None


def check_peers(directory: Path | None) -> None:
    """Raise ValueError for a --peers without peers.py, or outside a checkout."""
    if directory is not None:
        if not (directory / "peers.py").is_file():
            raise ValueError(f"--peers is {directory}, which has no peers.py; give the directory that has it")
        load_adapters("attention")
