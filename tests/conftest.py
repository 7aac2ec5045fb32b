"""What test files share: GPU tests skip where there are too few GPUs, a tiny model on disk, a process that no launcher
started.
"""

import gc
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from transformers.integrations import hub_kernels

from dcpmla.planning.weights import ModelSize
from tests.support.combinations import PROPERTY, Row, coverage
from tests.support.examples import load_profile
from tests.support.launchers import Host, two_hosts
from tests.support.models import save_tiny
from tests.support.plan_cases import read_v3

_NUM_GPUS = {"gpu": 1, "gpu_2": 2, "gpu_4": 4, "gpu_8": 8}
_RECORD = Path(__file__).resolve().parents[1] / "launch" / "tested_gpus.json"

load_profile()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", metavar="K/N", help="run every N-th test, from the K-th")
    parser.addoption("--seeds", type=int, default=1, metavar="N", help="number of arrays of families x features")


def pytest_configure(config: pytest.Config) -> None:
    """Give each process one thread and its share of the GPUs, and keep transformers' models, which run on CPUs, from
    kernels of other packages.

    Products are tiny: threads of one process would wait for each other on cores that other tests need.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # Processes that tests start read it.
    _take_gpus(_part(config))
    torch.set_num_threads(1)  # This process has read the variable before.
    name = "use_kernel_func_from_hub_with_fallback"  # from 5.24 on
    if hasattr(hub_kernels, name):
        setattr(hub_kernels, name, lambda *_: lambda function: function)


def _part(config: pytest.Config) -> str:
    """Return the part of the GPUs' tests that alone runs, "" for others: "gpu_2" of the expression "gpu_2 and x"."""
    first, *others = [*config.option.markexpr.split(), ""]
    return first if first in _NUM_GPUS and "or" not in others else ""


def _take_gpus(part: str) -> None:
    """Let this worker of several see as many GPUs as a test of the part needs."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if not worker or not part:
        return
    size, total = _NUM_GPUS[part], torch.cuda.device_count()
    if total > size:
        first = int(worker.removeprefix("gw")) % (total // size) * size
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + size)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose a fraction of the tests, and let slow ones start first: each worker's first two tests lie side by side."""
    number, total = map(int, config.option.part.split("/"))
    if total > 1:
        config.hook.pytest_deselected(items=[item for index, item in enumerate(items) if index % total != number - 1])
        items[:] = items[number - 1 :: total]
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if num_workers == 1 or not _RECORD.exists() or not _part(config):
        return
    parts = json.loads(_RECORD.read_text())["parts"].values()
    seconds = {name: each for part in parts for name, each in part["slow"].items()}
    items.sort(key=lambda item: -seconds.get(item.nodeid, 0))
    first, rest = items[:num_workers], items[num_workers:]
    short = [rest.pop() for _ in first if rest]
    paired = [item for pair in zip(first, short, strict=False) for item in pair]
    items[:] = [*paired, *first[len(short) :], *rest]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Report a phase of a test."""
    _report(report, report.when, report.duration)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Report a file that cannot be imported, or that is skipped because a package is missing."""
    if not report.passed:
        _report(report, "collect", 0.0)


def _report(report: pytest.TestReport | pytest.CollectReport, when: str, seconds: float) -> None:
    """Append an outcome to the file of a run of `launch/run_tests.py`, at once, because a run may not end."""
    path = os.environ.get("DCPMLA_OUTCOMES")
    if path and not os.environ.get("PYTEST_XDIST_WORKER"):
        if isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
        else:  # The end of a traceback, and of a rank's own above it.
            reason = "" if report.longrepr is None else str(report.longrepr)[-4000:]
        line = {"test": report.nodeid, "when": when, "outcome": report.outcome, "reason": reason}
        with open(path, "a") as file:
            file.write(json.dumps(line | {"seconds": round(seconds, 3)}) + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which pairs of families and features have run together."""
    reports = terminalreporter.getreports("passed")
    rows = [text for report in reports for name, text in report.user_properties if name == PROPERTY]
    if rows:
        terminalreporter.write_line(coverage(map(Row.parse, rows)))


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
def hosts() -> Iterator[tuple[Host, Host]]:
    with ExitStack() as stack:
        try:
            pair = stack.enter_context(two_hosts())
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield pair


@pytest.fixture
def v3() -> ModelSize:
    return read_v3()
