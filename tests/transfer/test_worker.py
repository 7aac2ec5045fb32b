"""The thread of transfers: errors fail transfers and do not end it."""

import logging
from threading import Event

import pytest
import torch

from dcpmla.transfer.worker import Worker

CPU = torch.device("cpu")


def test_an_error_fails_the_transfers_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    reasons, done, number = [], Event(), 0

    def poll() -> bool:
        nonlocal number
        number += 1
        if number in (2, 4):
            raise RuntimeError("the network is gone")
        if number == 6:
            done.set()
        return True

    def fail(reason: str) -> None:
        reasons.append(reason)
        raise ConnectionError("nobody hears of it")

    worker = Worker("test", CPU, poll, fail)
    with caplog.at_level(logging.ERROR):
        worker.start()
        assert done.wait(60)
        worker.close()
    assert reasons == 2 * ["RuntimeError: the network is gone"]
    assert len(caplog.records) == 1


def test_it_polls_once_more_before_it_ends() -> None:
    calls, polled = ["last"], []
    worker = Worker("test", CPU, lambda: bool(polled.append(calls.pop() if calls else "")), lambda reason: None)
    worker.start()
    worker.close()
    assert "last" in polled
