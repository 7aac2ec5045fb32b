"""A check of the tensors that this package's kernels get in ranks of tests (`tests/support/ranks.py`), interpreted or
on GPUs: kernels read the elements of a vector side by side, and have parameters for strides of matrices alone.

A vector may be strided where nobody expects it: `flatten()` of the one column of a wider tensor copies nothing.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


@cache
def check_kernel_arguments() -> None:
    """Raise AssertionError from now on where a kernel of this process gets a vector whose elements are apart."""
    for kind in (JITFunction, InterpretedFunction):
        kind.run = _checked(kind.run)


def _checked(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_checked(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
        for number, value in enumerate((*args, *kwargs.values()) if name.startswith("dcpmla.") else ()):
            if isinstance(value, Tensor) and value.dim() == 1 and len(value) > 1:
                (stride,) = value.stride()
                assert stride == 1, f"{name} gets {len(value)} elements at a stride of {stride} (argument {number})"
        return run(kernel, *args, **kwargs)

    return run_checked
