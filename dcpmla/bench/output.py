"""Measure W_UV with a quantized output on one device: W_UV alone, W_UV and the quantization one after the other, and
both as one kernel.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from dcpmla.attention.output.formats import OutputQuant
from dcpmla.attention.output.rows import OutputRows
from dcpmla.attention.projection_calls import ValueProjection
from dcpmla.attention.projections import project_values
from dcpmla.bench.results import Row
from dcpmla.bench.runner import Benchmark, Work
from dcpmla.bench.timing import num_rotated
from dcpmla.parallel.quantized import QuantizedRows

_RANK, _NOPE, _VALUE = 512, 128, 128  # latent, nope and value widths: DeepSeek V2 and V3, Kimi-K2
_MOST_DIFFERENT = 5e-4  # share of the bytes: sums in another order sometimes round to another bfloat16


class OutputCase(NamedTuple):
    """Heads of one rank and tokens of a step."""

    heads: int
    tokens: int


class OutputInputs:
    """Sets of random attention outputs [T, h, L] and W_UV [h, V, L], strided as in `w_kv_b`."""

    def __init__(self, case: OutputCase, dtype: torch.dtype, device: torch.device) -> None:
        def new_set() -> tuple[Tensor, Tensor]:
            w_kv_b = torch.randn(case.heads, _NOPE + _VALUE, _RANK, dtype=dtype, device=device) * _RANK**-0.5
            return torch.randn(case.tokens, case.heads, _RANK, dtype=dtype, device=device), w_kv_b[:, _NOPE:]

        set_bytes = case.heads * (case.tokens + _VALUE) * _RANK * dtype.itemsize
        self.sets = [new_set() for _ in range(num_rotated(set_bytes, device))]

    def project(self, index: int) -> Tensor:
        """Run W_UV alone."""
        return project_values(ValueProjection(*self.sets[index % len(self.sets)]))

    def fused(self, quant: OutputQuant, index: int) -> Tensor:
        """Run W_UV and the quantization as one."""
        out, w_uv = self.sets[index % len(self.sets)]
        rows = OutputRows(len(out), w_uv, out.dtype, quant)
        rows.project(out)
        return cast(QuantizedRows, rows.rows()).values

    def apart(self, quant: OutputQuant, index: int) -> Tensor:
        """Run W_UV, then the quantization."""
        values = self.project(index)
        rows = OutputRows(len(values), self.sets[0][1], values.dtype, quant)
        rows.append(values)
        return cast(QuantizedRows, rows.rows()).values


class Output(Benchmark[OutputCase, OutputInputs]):
    """Every kind of quantization on the same inputs."""

    ranks_of = "one"
    options = {"heads": "16,128", "tokens": "1,16,32,64,128,256,1024,4096"}
    series = ("quantization",)
    sample_seconds = 1.0

    def cases(self) -> Iterator[OutputCase]:
        return map(OutputCase._make, self.product("heads", "tokens"))

    def inputs(self, case: OutputCase) -> OutputInputs:
        return OutputInputs(case, self.dtype, self.device)

    def measure(self, case: OutputCase, inputs: OutputInputs) -> list[Row]:
        num_sets, rows = len(inputs.sets), []
        project_us = round(self.time(inputs.project, num_sets).median_us, 2)
        for name, quant in _quantizations(self.device).items():
            different = inputs.fused(quant, 0).view(torch.uint8) != inputs.apart(quant, 0).view(torch.uint8)
            fields = {"quantization": name, "project_us": project_us}
            fields["apart_us"] = round(self.time(partial(inputs.apart, quant), num_sets).median_us, 2)
            errors = {"different": float(different.float().mean())}
            work = Work(num_sets, lambda *_, errors=errors: errors, fields=fields)
            rows.append(self.kernel_row(case._asdict(), "", partial(inputs.fused, quant), work))
        return rows

    @staticmethod
    def limits(row: Row) -> dict[str, float]:
        return {"different": _MOST_DIFFERENT}


def _quantizations(device: torch.device) -> dict[str, OutputQuant]:
    scale = torch.tensor([4 / 448], device=device)  # suits values from a normal distribution
    return {
        "fp8": OutputQuant("fp8", scale=scale),
        "fp8 / 128": OutputQuant("fp8_groups"),
        "fp8 / 128 ue8m0": OutputQuant("fp8_groups", scale_layout="tma", ue8m0=True),
        "fp8 / 64": OutputQuant("fp8_groups", group_size=64),
        "nvfp4": OutputQuant("nvfp4", scale=6 / scale),
    }
