"""The store of a job's watchdogs: the posts of the ranks, and the claim of the rank that ends the job."""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import torch.distributed as dist

from dcpmla.job.faults import Post, read_post

BEAT = 0.5  # seconds between two posts of a rank
LOOK = 2.0  # seconds between two reads of all posts: a rank without a post in between is missing
_T = TypeVar("_T")


class Claim(NamedTuple):
    """The end of the job, by the rank that prints why."""

    rank: int
    code: int
    num_alive: int

    @classmethod
    def read(cls, text: bytes) -> Self | None:
        """Return a claim from the store; None for a value of another program or a broken one."""
        try:
            claim = cls(*json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        return claim if all(type(number) is int for number in claim) and 0 <= claim.code <= 255 else None


class Board:
    """The posts and the claim of a job's ranks, over a connection of its own to the store.

    Once the store is lost, nothing is written or read any more: its client does not reconnect.

    Args:
        timeout: Seconds between two reads after which the reader was stopped. Posts that arrived meanwhile count from
            the earlier read.
    Attributes:
        is_lost: Whether the store is lost.
        answered_at, read_at: Times of the store's last answer and of the last read of all posts.
    """

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, timeout: float) -> None:
        self._store = dist.PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]
        self._rank, self._timeout = rank, timeout
        self._posts: list[Post | None] = [None] * num_ranks
        self._arrived = [math.inf] * num_ranks  # times of the ranks' last new posts
        self.is_lost, self.answered_at, self.read_at = False, time.monotonic(), time.monotonic() - 2 * LOOK

    def write(self, post: Post) -> None:
        """Write this rank's post."""
        self._ask(lambda: self._store.set(f"post/{self._rank}", json.dumps(asdict(post))), None)

    def read_posts(self) -> list[Post | None]:
        """Return the last posts by rank, None for a rank that never came; an empty list once the store is lost."""
        return self._ask(self._read_posts, [])

    def ages(self) -> list[float]:
        """Return the seconds since each rank's last new post arrived, zero for a rank that was never seen.

        The reader's own monotonic clock counts, because hosts' clocks differ.
        """
        return [max(0.0, time.monotonic() - arrived) for arrived in self._arrived]

    def read_claim(self) -> Claim | None:
        """Return the claim of the rank that ends the job; None while no rank does."""
        return Claim.read(self._ask(lambda: self._store.get("claim") if self._store.check(["claim"]) else b"", b""))

    def claim(self, own: Claim) -> Claim:
        """Return the job's claim: the first rank's, or this rank's if the store has none or is lost."""
        return self._ask(lambda: self._claim(own), own)

    def settle(self, claim: Claim) -> None:
        """Wait until all ranks have read the claim, since any rank may serve the store."""
        until = time.monotonic() + LOOK
        num_settled = self._ask(lambda: self._store.add("settled", 1), claim.num_alive)
        while num_settled < claim.num_alive and time.monotonic() < until:
            time.sleep(BEAT / 5)
            num_settled = self._ask(lambda: self._store.add("settled", 0), claim.num_alive)

    def _read_posts(self) -> list[Post | None]:
        keys = [f"post/{rank}" for rank in range(len(self._posts))]
        written = keys if self._store.check(keys) else [key for key in keys if self._store.check([key])]
        posts = dict(zip(written, self._store.multi_get(written), strict=True))
        # A value that is no post counts as silence: its rank writes the next post soon, if it is alive.
        before, now = self._posts, time.monotonic()
        self._posts = [
            (read_post(posts[key]) or last) if key in posts else None for key, last in zip(keys, before, strict=True)
        ]
        arrived = self.read_at if now - self.read_at > self._timeout else now
        for rank, (last, post) in enumerate(zip(before, self._posts, strict=True)):
            if post and (last is None or last.beat != post.beat):
                self._arrived[rank] = arrived
        self.read_at = now
        return self._posts

    def _claim(self, own: Claim) -> Claim:
        text = self._store.compare_set("claim", "", json.dumps(own))
        if Claim.read(text) is None:
            text = self._store.compare_set("claim", text, json.dumps(own))  # type: ignore[arg-type]
        return Claim.read(text) or own

    def _ask(self, question: Callable[[], _T], otherwise: _T) -> _T:
        """Return the store's answer, or `otherwise` once the store is lost."""
        if self.is_lost:
            return otherwise
        try:
            answer = question()
        except RuntimeError:
            self.is_lost = True
            return otherwise
        self.answered_at = time.monotonic()
        return answer


def current_line(thread: int) -> tuple[str, bool]:
    """Return the line that a thread is at, outside of torch's own code, and whether it is in a collective there."""
    frame, waits = sys._current_frames().get(thread), False
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        waits = waits or frame.f_globals["__name__"].startswith("torch.distributed")
        frame = frame.f_back
    if frame is None:
        return "an unknown line", waits
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})", waits
