"""Measure linear layers on one device over weights in each format, beside torch's product with their values in
bfloat16.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dcpmla.bench.ceilings import measure_ceilings
from dcpmla.bench.options import named
from dcpmla.bench.results import Row, finite
from dcpmla.bench.runner import Benchmark, Work
from dcpmla.bench.timing import calls_over, num_rotated, time_operation
from dcpmla.bench.weights import WEIGHT_BYTES, random_weight
from dcpmla.job.join import Job
from dcpmla.parallel.formats import dequantize
from dcpmla.parallel.linear import Linear

_CHECKED_ROWS = 4  # compared with float64
# Of fp8, the format of its rows makes almost all.
_LARGEST_ERROR = defaultdict(lambda: 0.01, fp8=0.05)
SHAPES = {  # [out, in] of one rank
    "v3-o-tp4": (7168, 4096),
    "v3-q-b-tp4": (6144, 1536),
    "v3-gate-up-tp4": (9216, 7168),
    "v3-down-tp4": (7168, 4608),
    "glm5-o-tp4": (6144, 4096),
    "glm5-gate-up-tp4": (6144, 6144),
}
_SHAPES, _WEIGHTS = ",".join(SHAPES), ",".join(WEIGHT_BYTES)


class LinearCase(NamedTuple):
    """Rows through a layer."""

    geometry: str
    weights: str
    tokens: int


class LinearInputs:
    """Random rows, and so many layers that the weight of one has left the L2 when it comes again."""

    def __init__(self, case: LinearCase, dtype: torch.dtype, device: torch.device) -> None:
        self.num_out, self.num_in = shape = SHAPES[case.geometry]
        num_sets = num_rotated(int(self.num_out * self.num_in * WEIGHT_BYTES[case.weights]), device)
        self.stored = [random_weight(case.weights, shape, dtype, device) for _ in range(num_sets)]
        self.layers = [Linear(self.num_in, self.num_out, dtype=dtype, device=device) for _ in range(num_sets)]
        for layer, weight in zip(self.layers, self.stored, strict=True):
            layer.load(weight)
        self.values = [dequantize(weight, dtype) for weight in self.stored]
        self.x = torch.randn(case.tokens, self.num_in, dtype=dtype, device=device)

    def ours(self, index: int) -> Tensor:
        out: Tensor = self.layers[index % len(self.layers)](self.x)
        return out

    def plain(self, index: int) -> Tensor:
        """Multiply by the values."""
        return functional.linear(self.x, self.values[index % len(self.values)])

    def error(self, out: Tensor, index: int) -> Row:
        """Return the relative error (norms) of some rows against float64."""
        weight = dequantize(self.stored[index % len(self.stored)], torch.float32).double()
        answer = self.x[:_CHECKED_ROWS].double() @ weight.T
        return {"error": finite(float((out[:_CHECKED_ROWS] - answer).norm() / answer.norm()))}


class Linears(Benchmark[LinearCase, LinearInputs]):
    """A layer and torch's product with its values, on the same rows."""

    ranks_of = "one"
    options = {
        "shape": named([*SHAPES], "a shape", _SHAPES) | {"default": _SHAPES},
        "weights": named([*WEIGHT_BYTES], "a format", _WEIGHTS) | {"default": _WEIGHTS},
        "tokens": "1,8,32,128,1024,8192",
    }
    series = ("kernel", "weights")
    sample_seconds = 0.5

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        super().__init__(args, job)
        self.ceilings = measure_ceilings(self.device, self.dtype)

    def cases(self) -> Iterator[LinearCase]:
        return map(LinearCase._make, self.product("shape", "weights", "tokens"))

    def inputs(self, case: LinearCase) -> LinearInputs:
        return LinearInputs(case, self.dtype, self.device)

    def measure(self, case: LinearCase, inputs: LinearInputs) -> list[Row]:
        """Return the rows of torch's product and of the layer's."""
        size, num_sets = inputs.num_out * inputs.num_in, len(inputs.layers)
        rows = []
        # A GPU that has been idle runs faster at first than its power allows for long.
        time_operation(inputs.plain, self.device, calls_over(num_sets, self.device), self.sample_seconds)
        for name, run, value_bytes in (
            ("torch", inputs.plain, self.dtype.itemsize),
            ("dcpmla", inputs.ours, WEIGHT_BYTES[case.weights]),
        ):
            counted = 2 * case.tokens * size, int(size * value_bytes)
            is_fp8 = name == "dcpmla" and case.weights == "fp8"
            fields = {"hidden_size": inputs.num_in, "row_width": inputs.num_out, "bytes_read": counted[1]}
            work = Work(num_sets, inputs.error, *counted, in_fp8=is_fp8, fields=fields)
            row = self.kernel_row(case._asdict(), name, run, work)
            rows.append(row | self.speedup_over("torch", case, row["median_us"], name == "torch"))
        return rows

    @staticmethod
    def limits(row: Row) -> dict[str, float]:
        return {"error": _LARGEST_ERROR["plain" if row["kernel"] == "torch" else row["weights"]]}
