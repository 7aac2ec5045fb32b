"""How operations are timed: on all ranks alike, in a graph or call by call; a capture that broke off leaves nothing behind."""

from contextlib import nullcontext

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from dcpmla.cli import timing
from dcpmla.cli.timing import TimeLimit, time_operation

CPU = torch.device("cpu")


def limits_of_ranks() -> tuple[bool, bool, int]:
    """Whether time is over where it is over on rank 1 alone, and nowhere; the samples that little time leaves of many."""
    rank, calls = torch.distributed.get_rank(), []
    time_operation(calls.append, CPU, calls=1, num_samples=100, seconds=0.0)
    return TimeLimit(1000 * (1 - rank), CPU).is_over(), TimeLimit(1000, CPU).is_over(), len(calls)


def test_time_is_over_on_all_ranks_at_once() -> None:
    assert run_ranks(2, limits_of_ranks) == [(True, False, 3 + 1 + 5)] * 2  # warm-ups, one to see how long it takes, samples


def captures_of_ranks() -> list[tuple[bool, list[int], int]]:
    """(captured, calls, captures forgotten) where nothing fails; where rank 1 alone waits for the GPU; where its capture breaks off."""
    found = []
    for failing_call in (None, 0, 2):  # the first is watched, the others are captured
        calls: list[int] = []
        forgotten: list[object] = []

        def operation(index: int, calls: list[int] = calls, failing_call: int | None = failing_call) -> None:
            calls.append(index)
            if torch.distributed.get_rank() == 1 and len(calls) - 1 == failing_call:
                raise RuntimeError("operation not permitted when stream is capturing")

        with pytest.MonkeyPatch.context() as patch:
            for name in ("Stream", "CUDAGraph", "graph_pool_handle", "synchronize"):
                patch.setattr(torch.cuda, name, lambda: "fake")
            patch.setattr(torch.cuda, "stream", nullcontext)
            patch.setattr(timing, "error_on_host_sync", nullcontext)
            patch.setattr(timing, "capturing", lambda *_: nullcontext())
            patch.setattr(timing, "forget_capture", forgotten.append)
            graph = timing._capture(operation, 2, CPU)
        found.append((graph is not None, calls, len(forgotten)))
    return found


def test_an_operation_is_captured_on_all_ranks_or_on_none() -> None:
    first, second = run_ranks(2, captures_of_ranks)
    assert first == [(True, [0, 0, 1], 0), (False, [0], 0), (False, [0, 0, 1], 0)]
    assert second == [(True, [0, 0, 1], 0), (False, [0], 0), (False, [0, 0, 1], 1)]


def times_around_broken_captures() -> list[bool]:
    """Whether in a graph: before, of what waits as only a capture notices, of what runs out of memory in a capture, after."""
    rows = torch.randn(64, 64, device="cuda")

    def waits(_: int) -> None:
        torch.cuda.synchronize()

    def takes_too_much(_: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 50, device="cuda")

    def multiplies(_: int) -> Tensor:
        return rows @ rows

    def draws(_: int) -> Tensor:
        return torch.randn_like(rows)

    found, random_rows = [], []
    for operation in (multiplies, waits, draws, takes_too_much, multiplies):
        measured = time_operation(operation, rows.device, calls=2, num_samples=5)
        assert 0 < measured.median_us < 1e5
        found.append(measured.in_graph)
        random_rows.append(torch.randn(8, device="cuda"))  # torch thinks of no capture any more
        torch.cuda.empty_cache()
    assert len({tuple(row.tolist()) for row in random_rows}) == len(random_rows)
    return found


@pytest.mark.gpu
def test_what_breaks_a_capture_off_is_timed_call_by_call() -> None:
    assert run_ranks(1, times_around_broken_captures, device="cuda") == [[True, False, True, False, True]]
