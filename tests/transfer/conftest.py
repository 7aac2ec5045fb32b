"""Transfers without threads, under a clock of the test."""

import pytest

from tests.support.fake_transport import Clock
from tests.support.transfer_jobs import StillWorker

MODULES = ("outcome", "served", "side", "outgoing", "incoming")  # those that look at the time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the threads and the time of all transfers."""
    clock = Clock()
    monkeypatch.setattr("dcpmla.transfer.side.Worker", StillWorker)
    for module in MODULES:
        monkeypatch.setattr(f"dcpmla.transfer.{module}.time", clock)
    return clock
