"""Random weights in each format, of the products that benchmarks measure."""

import torch

from dcpmla.cache.formats import FP8
from dcpmla.parallel.formats import BLOCK, FP4, INT4, NVFP4, W4AFP8, AnyWeight, Quantized

_PACKED = {  # by the names of --weights
    **{"fp4": FP4, "nvfp4": NVFP4, "int4": INT4, "int4_128": INT4._replace(columns=BLOCK)},
    "w4afp8": W4AFP8,
    "awq": INT4._replace(columns=BLOCK, scales=torch.float16, has_zeros=True),
}
WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0} | {  # bytes of one value
    name: held.num_bytes((1, 7168)) / 7168 for name, held in _PACKED.items()
}


def random_weight(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> AnyWeight:
    """Return a random weight [.., N, K] of values of about K^-1/2.

    Args:
        name: Format, a key of WEIGHT_BYTES.
        dtype: Dtype of "bf16".
    """
    *lead, num_rows, num_cols = shape
    if name == "bf16":
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=num_cols**-0.5)
    codes = torch.randint(256, shape, dtype=torch.uint8, device=device)
    if name == "fp8":
        codes[(codes & 127) == 127] = 0  # NaN
        scales = torch.rand(*lead, -(-num_rows // BLOCK), num_cols // BLOCK, device=device)
        return Quantized(codes.view(FP8), (scales + 0.5) * num_cols**-0.5 / 100)
    held, codes = _PACKED[name], codes[..., : num_cols // 2].contiguous()
    groups = *lead, num_rows, num_cols // held.columns
    if held == FP4:
        return Quantized(codes, torch.randint(118, 123, groups, dtype=torch.uint8, device=device))
    scales = torch.rand(groups, device=device)
    if held == NVFP4:
        factors = torch.full((*lead, num_rows), num_cols**-0.5 / 3, device=device)
        return Quantized(codes, scales.to(held.scales), None, factors)
    zeros = torch.randint(16, groups, dtype=torch.uint8, device=device) if held.has_zeros else None
    return Quantized(codes, (scales * num_cols**-0.5 / 5).to(held.scales), zeros)
