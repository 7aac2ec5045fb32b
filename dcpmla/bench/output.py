"""Measure W_UV with a quantized output on one device: as one kernel, beside W_UV alone and W_UV followed by the
quantization.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dcpmla.attention.output.quant import OutputQuant, QuantizedOutput
from dcpmla.attention.output.rows import OutputRows
from dcpmla.attention.projections import project_values
from dcpmla.bench.plots import check_outputs
from dcpmla.bench.results import add_commit_argument, write_results
from dcpmla.bench.runner import measurement, memory_on_all, num_samples
from dcpmla.bench.timing import Operation, TimeLimit, Timing, time_operation
from dcpmla.cli.options import LOAD_TIMEOUT, add_job_arguments, join
from dcpmla.cli.values import positive_list, seconds
from dcpmla.job.bootstrap import agree
from dcpmla.job.launcher import LaunchInfo

_RANK, _NOPE, _VALUE = 512, 128, 128  # latent, nope and value widths: DeepSeek V2 and V3, Kimi-K2
_CACHE_BYTES = 1 << 27  # inputs rotate until so many bytes lie between two uses of the same ones: no GPU's L2 is larger
_SAMPLE_SECONDS = 1.0  # that the samples of one operation may take
_CALLS = 4  # of a sample, at least, on a GPU
_MOST_DIFFERENT = 5e-4  # of the bytes: sums in another order round to another bfloat16 at times
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    add = parser.add_argument
    add(
        "--heads",
        type=positive_list,
        default="16,128",
        metavar="H,...",
        help="of one rank: 16 are DeepSeek-V3's with -tp 8",
    )
    add("--tokens", type=positive_list, default="1,16,32,64,128,256,1024,4096", metavar="T,...", help="of a step")
    add("--time-limit", type=seconds, default=450, metavar="S", help="seconds after which no further case is begun")
    add_job_arguments(parser)
    add("--json", type=Path, metavar="OUT.json", help="write a row for each case and kind of quantization")
    add_commit_argument(parser)


class _Inputs:
    """Sets of random attention outputs [T, h, L] and W_UV [h, V, L], as it lies under W_UK."""

    def __init__(self, num_heads: int, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        def new_set() -> tuple[Tensor, Tensor]:
            w_kv_b = torch.randn(num_heads, _NOPE + _VALUE, _RANK, dtype=dtype, device=device) * _RANK**-0.5
            return torch.randn(num_tokens, num_heads, _RANK, dtype=dtype, device=device), w_kv_b[:, _NOPE:]

        self.num_heads, self.num_tokens, self.dtype, self.device = num_heads, num_tokens, dtype, device
        set_bytes = num_heads * (num_tokens + _VALUE) * _RANK * dtype.itemsize
        self.sets = [new_set() for _ in range(-(-_CACHE_BYTES // set_bytes) if device.type == "cuda" else 1)]

    def project(self, index: int) -> Tensor:
        """W_UV alone."""
        return project_values(*self.sets[index % len(self.sets)])

    def fused(self, quant: OutputQuant, index: int) -> Tensor:
        """W_UV and the quantization as one."""
        out, w_uv = self.sets[index % len(self.sets)]
        rows = OutputRows(self.num_tokens, w_uv, quant)
        rows.project(out)
        return cast(QuantizedOutput, rows.finish()).values

    def apart(self, quant: OutputQuant, index: int) -> Tensor:
        """W_UV, then the quantization."""
        rows = OutputRows(self.num_tokens, self.sets[0][1], quant)
        rows.append(self.project(index))
        return cast(QuantizedOutput, rows.finish()).values

    def time(self, operation: Operation) -> Timing:
        calls = max(_CALLS, len(self.sets)) if self.device.type == "cuda" else 1
        return time_operation(operation, self.device, calls, num_samples(self.device), _SAMPLE_SECONDS)


def run(args: argparse.Namespace) -> None:
    """Measure every case with every kind of quantization, report."""
    with join(args, _check_alone) as job, torch.inference_mode():
        with agree():
            check_outputs(args.json, None)
        device, rows = job.ranks.device, []
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        limit = TimeLimit(args.time_limit, device)
        for num_heads, num_tokens in ((heads, tokens) for heads in args.heads for tokens in args.tokens):
            name = f"{num_heads} heads, {num_tokens:,} tokens"
            if limit.is_over():
                print(f"time is over (--time-limit): {name} and what follows is left out", flush=True)
                break
            with measurement(args, job, name):
                with memory_on_all():
                    inputs = _Inputs(num_heads, num_tokens, dtype, device)
                project = inputs.time(inputs.project)
                for kind, quant in _kinds(device).items():
                    rows.append(_row(kind, quant, inputs, project))
                    print(_line(name, rows[-1]), flush=True)
                del inputs  # before the next ones are made
        job.watchdog.enter("writing the results", LOAD_TIMEOUT)
        if args.json:
            write_results(args.json, rows, 1, device, args.commit)


def _check_alone(launch: LaunchInfo) -> None:
    if launch.num_ranks != 1:
        raise ValueError(f"bench output measures one device, but {launch.num_ranks} ranks were started; start one")


def _kinds(device: torch.device) -> dict[str, OutputQuant]:
    scale = torch.tensor([4 / 448], device=device)  # of values that are normal
    return {
        "fp8": OutputQuant(kind="fp8", scale=scale),
        "fp8 / 128": OutputQuant(kind="fp8_groups"),
        "fp8 / 128 ue8m0": OutputQuant(kind="fp8_groups", scale_layout="tma", ue8m0=True),
        "fp8 / 64": OutputQuant(kind="fp8_groups", group_size=64),
        "nvfp4": OutputQuant(kind="nvfp4", scale=6 / scale),
    }


def _row(kind: str, quant: OutputQuant, inputs: _Inputs, project: Timing) -> Row:
    different = inputs.fused(quant, 0).view(torch.uint8) != inputs.apart(quant, 0).view(torch.uint8)
    fused, apart = (inputs.time(partial(way, quant)) for way in (inputs.fused, inputs.apart))
    return {
        "kind": kind,
        "num_heads": inputs.num_heads,
        "num_tokens": inputs.num_tokens,
        "dtype": str(inputs.dtype).removeprefix("torch."),
        "num_sets": len(inputs.sets),
        "in_graph": fused.in_graph,
        "project_us": round(project.median_us, 2),
        "apart_us": round(apart.median_us, 2),
        "fused_us": round(fused.median_us, 2),
        "different": float(different.float().mean()),
    }


def _line(name: str, row: Row) -> str:
    times = f"fused {row['fused_us']:>9,.1f} us   apart {row['apart_us']:>9,.1f} us   W_UV alone {row['project_us']:>9,.1f} us"
    is_right = row["different"] <= _MOST_DIFFERENT
    return f"{name:<26} {row['kind']:<16} {times}   x {row['fused_us'] / row['project_us']:.2f}{'' if is_right else '   WRONG'}"
