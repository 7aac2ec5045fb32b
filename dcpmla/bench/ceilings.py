"""Peak rates of a device, and the least time of an operation that follows from them."""

from typing import Any, NamedTuple

import torch

from dcpmla.bench.cache_formats import scale_tensor
from dcpmla.bench.results import Row
from dcpmla.bench.timing import time_operation
from dcpmla.cache.formats import FP8


class Ceilings(NamedTuple):
    """Peak rates of the device: FLOP/s of a matrix product alone (and of one in e4m3), bytes/s of a read alone."""

    flops_per_second: float
    bytes_per_second: float
    fp8_flops_per_second: float

    def floor_us(self, num_bytes: float, flops: float = 0.0, *, in_fp8: bool = False) -> float:
        """Return a lower bound of the microseconds of an operation that reads and multiplies so much."""
        flops_per_second = self.fp8_flops_per_second if in_fp8 else self.flops_per_second
        return max(flops / flops_per_second, num_bytes / self.bytes_per_second) * 1e6


def floor_fields(floor_us: float, time_us: float) -> Row:
    """Return the fields of a row on the least time of what took a time."""
    return {"floor_us": round(floor_us, 2), "floor_share": round(floor_us / time_us, 4)}


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Time products of 8192 x 8192 matrices and the maximum over 2 GiB (on CPUs: 256 and 1 MiB).

    A device without e4m3 products gets the rate of `dtype` for e4m3.
    """
    size, num_bytes = (8192, 2 << 30) if device.type == "cuda" else (256, 1 << 20)
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    product = fp8_product = time_operation(lambda _: left @ right, device, 2)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        left, right, one = left.to(FP8), right.to(FP8).T, scale_tensor(1.0, device)
        scaled: dict[str, Any] = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        fp8_product = time_operation(lambda _: torch._scaled_mm(left, right, **scaled), device, 2)
    words = torch.randint(1 << 30, (num_bytes // 4,), device=device, dtype=torch.int32)
    read = time_operation(lambda _: words.max(), device, 2)
    flops, fp8_flops = (2 * size**3 / timing.median_us * 1e6 for timing in (product, fp8_product))
    return Ceilings(flops, num_bytes / read.median_us * 1e6, fp8_flops)
