"""Triton's interpreter with GPUs' conversions: its own truncate to bfloat16 and lose e4m3's carry into the exponent."""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}


def convert_as_torch() -> None:
    """Make this process convert as torch does from now on: rounded to nearest, ties to even."""

    def convert(data: Any, source: Any, target: Any, _: Any) -> Any:
        x = torch.from_numpy(np.frombuffer(data.tobytes(), np.uint8).copy()).view(_TYPES[source]).to(_TYPES[target])
        return x.view(torch.uint8).numpy().view(f"u{_TYPES[target].itemsize}").reshape(data.shape)

    interpreter._convert_float = convert
