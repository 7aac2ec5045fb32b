"""Decode kernels, ours and others' (peers), measured on the same inputs; `benchmarks/peers/` of a checkout has the
adapters of others.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dcpmla.attention.backends.choice import DECODE_BACKENDS
from dcpmla.attention.mla.decode import mla_decode
from dcpmla.bench.decode_inputs import Answer, DecodeCase, DecodeInputs
from dcpmla.bench.results import Row, error_fields, leave_out, left_out
from dcpmla.bench.runner import Benchmark, Work
from dcpmla.bench.timing import largest
from dcpmla.bench.words import name_of
from dcpmla.job.faults import is_out_of_memory

# Errors of out or lse, by the queries' dtype; a larger one means that something else was computed. Products in bfloat16
# stay below 0.005 over every cache. Products in e4m3 round probabilities too, by up to 1/16 each: 1.7 % of the
# outputs, 2.2 % where small ones are denormals.
_LARGEST_ERROR = {"auto": 0.02, "fp8": 0.04}
_ROUNDS = {"cuda": 2, "cpu": 1}  # the last round counts: each kernel then finds the clock that the others leave


class Formats(NamedTuple):
    """Formats of the cache and of the queries that a peer reads."""

    kv_cache_dtype: str = "bf16"
    decode_query_dtype: str = "auto"

    def match(self, case: DecodeCase) -> bool:
        """Return whether a case has these formats."""
        return self == (case.kv_cache_dtype, case.decode_query_dtype)


class Kernel(Protocol):
    """A kernel made for a case. Its constructor raises ValueError for an unsupported case."""

    def launch(self, index: int) -> tuple[Tensor, Tensor]:
        """Run the timed call, over set `index`; return (out, lse) in the kernel's own layout."""

    def result(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return results of `launch` as [T, H, 512] and [T, H] natural log, (0, -inf) where a query sees no token."""


MakeKernel = Callable[[DecodeInputs], Kernel]


class Ours:
    """`dcpmla.mla_decode`, on the backend that it selects or on a named one."""

    def __init__(self, inputs: DecodeInputs, backend: str = "auto") -> None:
        self.inputs, self.backend = inputs, backend

    def launch(self, index: int) -> tuple[Tensor, Tensor]:
        return mla_decode(self.inputs.call(index, self.backend))

    def result(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out, lse


OURS = {"dcpmla": "auto", **{f"dcpmla-{backend.name}": backend.name for backend in DECODE_BACKENDS}}
PEERS = {
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


def load_kernels(names: Sequence[str], directory: Path | None) -> Iterator[tuple[str, MakeKernel]]:
    """Yield the names and makers of the kernels that can be had here; print a line on each that cannot."""
    for name in names:
        if name in OURS:
            yield name, partial(Ours, backend=OURS[name])
            continue
        with leave_out(name):
            yield name, load_adapters("attention").load_kernel(name, directory)


def check_peers(directory: Path | None) -> None:
    """Raise ValueError for a --peers without peers.py, or outside a checkout."""
    if directory is not None:
        if not (directory / "peers.py").is_file():
            raise ValueError(f"--peers is {directory}, which has no peers.py; give the directory that has it")
        load_adapters("attention")


class AttentionKernels:
    """Decode kernels of a benchmark, in rows of their own.

    Args:
        kernels: Makers of kernels, by name.
    """

    def __init__(self, benchmark: Benchmark[Any, Any], kernels: Mapping[str, MakeKernel]) -> None:
        self._benchmark, self._kernels = benchmark, kernels
        self._refused: set[str] = set()  # kernels that did not take some case, which is said once

    def rows(self, case: Row, inputs: DecodeInputs, fields: Row, *, counts: bool) -> list[Row]:
        """Return a row for each kernel that takes a case; ours with their ratios to the peers. Collective.

        Args:
            counts: Whether all of a request's context is attended to, so that operations and bytes are known.
        """
        benchmark, decode = self._benchmark, inputs.case
        device, rows = benchmark.device, dict[str, Row]()
        made, answer = dict[str, Kernel](), cache(partial(Answer, inputs))

        def errors(name: str, result: tuple[Tensor, Tensor], index: int) -> Row:
            found = answer(index).errors(*made[name].result(*result))
            return error_fields(*(largest(error, device) for error in found))

        for name, make in [*self._kernels.items()] * _ROUNDS[device.type]:
            if name in PEERS and not PEERS[name].match(decode):
                continue
            flops, num_bytes = (decode.flops, decode.num_bytes(benchmark.dtype.itemsize)) if counts else (0, 0)
            in_fp8 = decode.decode_query_dtype == "fp8"
            work = Work(len(inputs.caches), partial(errors, name), flops, num_bytes, in_fp8, fields)
            try:
                made[name] = make(inputs)
                rows[name] = benchmark.kernel_row(case, name, made[name].launch, work)
            except Exception as error:  # others' code may raise anything
                is_refusal = isinstance(error, ValueError) or is_out_of_memory(error)
                if benchmark.job.ranks.num_ranks > 1 or (name in OURS and not is_refusal):
                    raise  # other ranks would wait for this one
                if name not in self._refused:
                    self._refused.add(name)
                    print(left_out(f"{name} of {name_of(decode)}", error), flush=True)
        right = [row for row in rows.values() if not benchmark.wrong(row)]
        for row in (row for row in right if row["kernel"] in OURS):
            peers = {peer["kernel"]: peer["median_us"] for peer in right if peer["kernel"] in PEERS}
            row.update({f"speedup_over_{name}": round(us / row["median_us"], 3) for name, us in peers.items()})
        return [*rows.values()]


def attention_limits(row: Row) -> dict[str, float]:
    """Return the largest right errors of a decode kernel."""
    return dict.fromkeys(("error", "lse_error"), _LARGEST_ERROR[row.get("decode_query_dtype", "auto")])
