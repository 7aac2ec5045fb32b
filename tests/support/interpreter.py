"""Triton's interpreter with GPUs' conversions and less repeated work. Triton has no option for either, so functions of
its own are replaced: its conversions (3.9) truncate to bfloat16, round halves up, and lose e4m3's carry into the
exponent.
"""

from functools import cache
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


@cache
def patch_once() -> None:
    """Patch Triton's language at the first call into each module, not at each call, which is three quarters of a small
    kernel's time; and build one table of NumPy's types, not one at each look-up, a fifth of the rest (3.9). A process
    that interprets never compiles, so patches stay.
    """
    patch, find = interpreter._patch_lang, interpreter._get_np_dtype
    patched: set[int] = set()
    types: dict[str, Any] = {}

    def patch_module(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in patched:
            patched.add(module)
            patch(function)
        return interpreter._LangPatchScope()  # A new scope restores nothing.

    def find_once(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if element.name not in types:
            types[element.name] = find(element)
        return types[element.name]

    interpreter._patch_lang = patch_module
    interpreter._get_np_dtype = find_once
