"""Random weights in 4 bits."""

import torch

from dcpmla.parallel.formats import Quantized

KINDS = (
    *("fp4", "nvfp4", "int4", "int4_64", "int4_128", "int4_128_half"),
    *("int4_32_zeros", "int4_64_zeros", "int4_128_zeros"),
)


def make_packed(kind: str, rows: tuple[int, ...], num_cols: int, generator: torch.Generator) -> Quantized:
    """Return weights [.., N, K] of about K^-1/2: a kind is codes, columns of a group, and whether it has zero points
    and scales in float16, or the latter alone.
    """
    name, *of_name = kind.split("_")
    columns = int(of_name[0]) if of_name else 32
    codes = torch.randint(256, (*rows, num_cols // 2), dtype=torch.uint8, generator=generator)
    shape = *rows, num_cols // (16 if name == "nvfp4" else columns)
    if name == "fp4":
        return Quantized(codes, torch.randint(118, 123, shape, dtype=torch.uint8, generator=generator))
    scales = torch.rand(shape, generator=generator) * num_cols**-0.5 / 3
    if name == "nvfp4":
        factors = torch.rand(rows, generator=generator) + 0.5
        return Quantized(codes, (scales * 100).to(torch.float8_e4m3fn), None, factors / 100)
    scales = scales.to(torch.float16 if kind.endswith(("half", "zeros")) else torch.bfloat16)
    zeros = torch.randint(16, shape, dtype=torch.uint8, generator=generator) if kind.endswith("zeros") else None
    return Quantized(codes, scales, zeros)
