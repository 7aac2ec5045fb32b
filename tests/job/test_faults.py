"""`generate` in real processes, one of which is killed, asleep or told to stop: all end with one line.

`test_watchdog.py` has other faults, of ranks that only meet in collectives.
"""

import pickle
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.generate_jobs import MARGIN, TIMEOUT, Ended, at, direct, restarted

AGAIN = "run the same command again"
GONE = f"its process or host is gone or stopped: see its log, then {AGAIN}"
MISSING = rf"rank 1 is missing, last seen \d+ s ago in {{0}}\b.*; {GONE}"
LOST = f"rank 0 lost the others .* in {{0}}.*: {MISSING}"
ASLEEP = at("decode step 8", "sleep")
LONG_IDS = [f"{index} {20_000 * 'x'}" for index in range(6)]
# -> options of `direct`, exit codes, what the line says, least number of outputs
JOBS: dict[str, tuple[dict[str, Any], list[int], str, int]] = {
    "killed at launch": (
        {"fault": at("launch", "kill")},
        [1, -9],
        "rank 0 of 2 .* did not meet the others within 5 s",
        0,
    ),
    "killed while loading": ({"fault": at("loading", "kill")}, [1, -9], LOST.format("loading the model"), 0),
    "killed in decode": ({"fault": at("decode step 8", "kill")}, [1, -9], LOST.format("decode step 8"), 2),
    "killed at shutdown": ({"fault": at("shutdown", "kill")}, [1, -9], LOST.format("shutdown"), 6),
    "asleep": (
        {"fault": ASLEEP},
        [1, 1],
        r"(rank 0 waited .*: )?rank 1 has .* decode step 8 .* for \d+ s, at faulty.py:\d+ \(fail\); "
        f"see what holds it there, then {AGAIN}",
        2,
    ),
    "unequal arguments": (
        {"more": ["--max-num-seqs", "3"]},
        [2, 2],
        "max_num_seqs differs between ranks: 2 on rank 0, 3 on rank 1; start all ranks with the same",
        0,
    ),
    "full disk": (
        {"fault": at("prefill step 0", "fill", rank=0), "ids": LONG_IDS},
        [1, 1],
        r"rank 0 could not write /.*out.jsonl \(File too large\) in .* step .*: "
        rf"make room, or raise the limit \(ulimit -f\); then {AGAIN}",
        2,
    ),
    "one rank terminated": (
        {"fault": ASLEEP, "send": (signal.SIGTERM, 0)},
        [143, 143],
        rf"rank 0 was asked to stop \(SIGTERM\) in decode step 8 .*: {AGAIN}",
        2,
    ),
}


@pytest.fixture(scope="module")
def jobs(model: Path) -> Iterator[dict[str, Future[Ended]]]:
    """Run all jobs, a few at a time, since most of their time is waiting."""
    with ThreadPoolExecutor(3) as pool:
        yield {name: pool.submit(direct, model, **options) for name, (options, _, _, _) in JOBS.items()}


@pytest.mark.parametrize("name", JOBS)
def test_all_end_with_one_line(name: str, jobs: dict[str, Future[Ended]]) -> None:
    _, codes, line, num_outputs = JOBS[name]
    ended = jobs[name].result()
    assert ended.codes == codes, ended.text
    assert len(ended.lines) == (line != ""), ended.text
    assert not line or re.search(f"dcpmla: error: {line}", ended.lines[0]), ended.lines[0]
    assert ended.seconds < TIMEOUT + MARGIN
    assert len(ended.ids) == len(set(ended.ids)) >= num_outputs


def test_a_restart_goes_on(model: Path) -> None:
    """In the store of the first start, and with its outputs."""
    first, second = restarted(model, at("decode step 8", "kill"))
    assert (first.codes, second.codes) == ([1, -9], [0, 0]), second.text
    assert len(second.lines) == 1, second.text
    assert 2 <= len(first.ids) < len(second.ids) == len({*second.ids}) == 6


def test_ranks_leave_their_flight_records(jobs: dict[str, Future[Ended]]) -> None:
    """The rank that waited has its last collective open; the rank that slept does not have it."""
    flights = {rank: pickle.loads(flight)["entries"] for rank, flight in jobs["asleep"].result().flights.items()}
    assert sorted(flights) == [0, 1]
    assert len(flights[0]) == len(flights[1]) + 1
    assert "frames" in flights[0][-1]
