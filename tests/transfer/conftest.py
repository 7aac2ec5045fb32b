"""Transfers without threads, under a clock of the test."""

import pytest

from tests.support.fake_transport import Clock
from tests.support.transfer_jobs import still_transfers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return still_transfers(monkeypatch)
