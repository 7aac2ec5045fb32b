"""Numbers of GPUs that a test runs on, each with the marker of the machine that has them."""

from typing import Any

import pytest

_MARKERS = {1: pytest.mark.gpu, 2: pytest.mark.gpu_2, 4: pytest.mark.gpu_4, 8: pytest.mark.gpu_8}


def on_gpus(*numbers: int) -> Any:
    """Parametrize `num_gpus` of a test."""
    params = [
        pytest.param(number, marks=next(marker for size, marker in _MARKERS.items() if size >= number))
        for number in numbers
    ]
    return pytest.mark.parametrize("num_gpus", params)
