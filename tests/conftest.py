"""GPU tests skip where there are too few GPUs."""

import pytest
import torch

_NUM_GPUS = {"gpu": 1, "gpu_2": 2, "gpu_4": 4, "gpu_8": 8}


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = max((count for marker, count in _NUM_GPUS.items() if item.get_closest_marker(marker)), default=0)
    if needed > torch.cuda.device_count():
        pytest.skip(f"needs {needed} GPUs, there are {torch.cuda.device_count()}")
