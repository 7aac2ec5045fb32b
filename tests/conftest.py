"""What test files share: GPU tests skip where there are too few GPUs, a tiny model on disk, a process that no launcher
started.
"""

import gc
import os
from pathlib import Path

import pytest
import torch
from transformers.integrations import hub_kernels

from dcpmla.planning.weights import ModelSize
from tests.support.models import save_tiny
from tests.support.plan_cases import read_v3

_NUM_GPUS = {"gpu": 1, "gpu_2": 2, "gpu_4": 4, "gpu_8": 8}


def pytest_configure() -> None:
    """Give each process one thread, and keep transformers' models, which run on CPUs, from kernels of other packages.

    Products are tiny: threads of one process would wait for each other on cores that other tests need.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # Processes that tests start read it.
    torch.set_num_threads(1)  # This process has read the variable before.
    name = "use_kernel_func_from_hub_with_fallback"  # from 5.24 on
    if hasattr(hub_kernels, name):
        setattr(hub_kernels, name, lambda *_: lambda function: function)


def pytest_collection_finish() -> None:
    """Freeze the heap: with all modules and tests in it, a full collection of garbage takes half a second."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = max((count for marker, count in _NUM_GPUS.items() if item.get_closest_marker(marker)), default=0)
    if needed > torch.cuda.device_count():
        pytest.skip(f"needs {needed} GPUs, there are {torch.cuda.device_count()}")
    torch.manual_seed(0)  # a test that fails once fails again


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny DeepSeek-V3 without a tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    save_tiny("deepseek_v3", directory)
    return directory


@pytest.fixture
def one_process_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that call `main` here: what it sets in the environment is gone afterwards."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # --device cpu sets it


@pytest.fixture
def v3() -> ModelSize:
    return read_v3()
