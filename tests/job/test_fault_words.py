"""Faults in words: which ranks the last posts blame, and what an exception says to the operator."""

import errno
import json
import os
import re
from dataclasses import asdict, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcpmla.job import board
from dcpmla.job.faults import Post, blame, explain, find_missing, read_post
from dcpmla.parallel.collectives import PeerFault


def post(**changes: Any) -> Post:
    return replace(Post(7, 5, "decode step 5", 61.0, 60.0, "engine.py:9 (step)", True, False, False), **changes)


WAITED = "rank 0 waited 61 s in decode step 5: "
BLAMES = [
    ([post(count=4, operation="prefill step 4")], "rank 1 has been in prefill step 4 for 61 s"),
    ([post(waits=False, line="app.py:3 (callback)"), post()], r"rank 1 has been in .* at app.py:3 \(callback\)"),
    ([post(count=6), post(left=True)], ".*rank 2 left the job"),
    ([post(count=4), post(count=4), post()], "each of ranks 1, 2 has been in"),
    ([post(line="b.py:1 (f)"), post(), post()], r"rank 1 in decode step 5 at b.py:1 \(f\); each of ranks 0, 2, 3 in"),
]


@pytest.mark.parametrize(("others", "words"), BLAMES)
def test_blame_names_who_lags(others: list[Post], words: str) -> None:
    verdict = blame(0, [post(), *others], [], 60, [0.0] * 4)
    assert re.match(WAITED + words, verdict.words), verdict.words
    assert not verdict.excused


def test_values_that_are_no_posts() -> None:
    written = asdict(post(limit=1800))
    assert read_post(json.dumps(written).encode()) == post(limit=1800)
    lacking = {name: value for name, value in written.items() if name != "beat"}
    wrong = [{**written, name: None} for name in written] + [{**written, "beat": True}, {**written, "more": 1}, lacking]
    for text in (b"", b"\xff", b"7", b"[" * 99999, *(json.dumps(values).encode() for values in wrong)):
        assert read_post(text) is None, text[:80]


def test_blame_of_oneself() -> None:
    here = post(waits=False, line="app.py:3 (callback)")
    for posts in ([here], [here, post()], [here, post(count=6)]):
        assert blame(0, posts, [], 60, [0.0] * 2).words.startswith(
            "rank 0 has not come back from decode step 5 for 61 s, at app.py:3 (callback)"
        )


def test_patience() -> None:
    """A rank waits while it or the one it waits for is within its limit, or silent for less than the timeout."""
    assert blame(0, [post(), post(count=4, limit=1800.0)], [], 60, [0.0, 0.0]).excused
    assert blame(0, [post(), post()], [1], 60, [0.0, 50.0]).excused
    assert not blame(0, [post(), post()], [1], 60, [0.0, 70.0]).excused
    assert not blame(0, [post(), None], [1], 60, [0.0, 0.0]).excused
    assert blame(0, [post(limit=1800.0), post(count=4)], [], 60, [0.0, 0.0]).excused
    assert not blame(0, [post(limit=1800.0), post()], [1], 60, [0.0, 70.0]).excused


def test_missing_are_those_who_stopped_posting() -> None:
    before = [post(beat=3), post(beat=3), post(beat=3, left=True), None, None]
    after = [post(beat=4), post(beat=3), post(beat=3, left=True), post(beat=1), None]
    assert find_missing(before, after) == [1, 4]


class Clock:
    """A board of two ranks whose clock a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(board, "time", SimpleNamespace(monotonic=lambda: self.now))
        store = dist.HashStore()
        self._writers = [board.Board(store, rank, 2, 60) for rank in range(2)]
        self.board = self._writers[0]

    def read(self, now: float, *beats: int) -> list[float]:
        """Write the beats of the first ranks and read all posts at a time; return the ages then."""
        for writer, beat in zip(self._writers, beats, strict=False):
            writer.write(post(beat=beat))
        self.now = now
        self.board.read_posts()
        return self.board.ages()


def test_ages_are_the_reader_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank ages while its post stays the same; a new one makes it young, and one that never came has no age."""
    clock = Clock(monkeypatch)
    for now, beat in ((100.0, 1), (102.0, 2), (104.0, 2), (145.0, 2)):
        clock.read(now, beat)
    assert clock.read(165.0, 2) == [63.0, 0.0]
    clock.read(166.0, 1, 7)
    clock.now = 167.0
    assert clock.board.ages() == [1.0, 1.0]


def test_a_reader_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not take an old post for a new one, but a post after its return is new."""
    clock = Clock(monkeypatch)
    clock.read(100.0, 1)
    assert clock.read(200.0, 2)[0] == 100.0
    assert clock.read(202.0, 3)[0] == 0.0


def test_posts_carry_no_time_of_day() -> None:
    """The clock of a rank's host, an hour ahead, would hide for an hour that the rank is gone."""
    assert "time" not in {field.name for field in fields(Post)}


def chained(error: Exception, cause: Exception) -> Exception:
    try:
        raise error from cause
    except Exception as caught:
        return caught


FULL, TOO_LARGE = (OSError(code, os.strerror(code)) for code in (errno.ENOSPC, errno.EFBIG))
FULL.filename = "/x/out.jsonl"
CAUSES: list[tuple[Exception, str]] = [
    (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        "ran out of memory (OutOfMemoryError: CUDA out",
    ),
    (chained(RuntimeError("generate failed"), MemoryError()), "ran out of memory (MemoryError"),
    (FULL, "could not write /x/out.jsonl (No space left on device)"),
    (TOO_LARGE, "could not write (File too large)"),
    (FileNotFoundError(errno.ENOENT, "No such file", "x"), "failed (FileNotFoundError: No such file: 'x')"),
]
CONSEQUENCES: list[tuple[Exception, str]] = [
    (
        RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer. This is typically"),
        "lost the others (RuntimeError: Read error: Connection reset by peer)",
    ),
    (
        chained(RuntimeError("generate failed"), dist.DistBackendError("NCCL error")),
        "lost the others (DistBackendError: NCCL",
    ),
    (PeerFault("rank 1 failed: CUDA out of memory"), "lost another rank (rank 1 failed: CUDA out of memory)"),
]


@pytest.mark.parametrize(("error", "what"), [*CAUSES, *CONSEQUENCES])
def test_exceptions_in_words(error: Exception, what: str) -> None:
    fault = explain(error)
    assert fault.what.startswith(what), fault.what
    assert fault.is_consequence is ((error, what) in CONSEQUENCES)
