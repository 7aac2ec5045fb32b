"""A fault in one line: from what the ranks last said of themselves, or from an exception, to words for the operator.

Pure functions.
"""

import errno
import re
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dcpmla.parallel.collectives import PeerFault, is_failed_collective, name_ranks

RESTART = "run the same command again (finished outputs are on disk and are kept)"
_LOOK = f"see what holds it there, then {RESTART}; or raise --timeout"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "bad_alloc",
    "alloc_failed",
)  # CUDA, torch's CPU allocator, C++, cuBLAS


@dataclass(frozen=True)
class Post:
    """What a rank last said of itself.

    Attributes:
        beat: grows with each post; where it stands still, the process is gone or stopped.
        count: operations entered so far. Ranks enter the same ones in the same order, so a lower count is a rank
        behind.
        seconds: in the operation so far. limit: seconds it may take.
        where: line of code where the main thread was. waits: in a collective there.
        left: the rank has ended in order. failed: it is about to end, for a fault that it has found.
        time: of the post, seconds since the epoch.
    """

    beat: int
    count: int
    operation: str
    seconds: float
    limit: float
    where: str
    waits: bool
    left: bool
    failed: bool
    time: float


@dataclass(frozen=True)
class Verdict:
    """Why a rank waits too long, in words; `excused` while those it waits for are within limits of their own."""

    words: str
    excused: bool = False


@dataclass(frozen=True)
class Fault:
    """An exception as the operator reads it: "rank 1 `what` in decode step 17: `advice`"."""

    what: str
    advice: str
    is_consequence: bool = False  # of another rank's fault, most likely
    details: str = ""


def find_missing(before: Sequence[Post | None], after: Sequence[Post | None]) -> list[int]:
    """Ranks that never posted, or not between two looks at all posts; one that left in order is not missing."""
    pairs = enumerate(zip(before, after, strict=True))
    return [
        rank for rank, (old, new) in pairs if new is None or (old is not None and old.beat == new.beat and not new.left)
    ]


def describe_missing(missing: Sequence[int], posts: Sequence[Post | None], now: float) -> str:
    last = posts[missing[0]]
    seen = (
        f"last seen {max(0.0, now - last.time):.0f} s ago in {last.operation}, at {last.where}"
        if last
        else "it never came"
    )
    return (
        f"{name_ranks(missing)} is missing, {seen}; its process or host is gone or stopped: see its log, then {RESTART}"
    )


def blame(rank: int, posts: Sequence[Post | None], missing: Sequence[int], timeout: float, now: float) -> Verdict:
    """Why a rank waits: because some are lost, or, beyond the limit of its operation, because of those who are behind.

    Args:
        rank: who asks.
        posts: of every rank, by rank; None from one that never came.
        missing: ranks that no longer post.
        timeout: seconds without a post after which a rank is given up.
        now: seconds since the epoch.
    """
    mine = posts[rank]
    assert mine is not None
    waited = f"rank {rank} waited {mine.seconds:.0f} s in {mine.operation}: "
    if missing:
        seen = [post for post in (posts[other] for other in missing) if post]
        excused = len(seen) == len(missing) and all(now - post.time < timeout for post in seen)
        return Verdict(waited + describe_missing(missing, posts, now), excused)
    if mine.seconds < mine.limit:
        return Verdict("", excused=True)
    here = {other: post for other, post in enumerate(posts) if post and not post.left}
    lagging = [other for other, post in here.items() if post.count < mine.count]
    busy = [other for other, post in here.items() if post.count == mine.count and not post.waits]
    late = lagging or busy
    if rank in late and (len(late) < len(here) or len(posts) == 1):
        return Verdict(
            f"rank {rank} has not come back from {mine.operation} for {mine.seconds:.0f} s, at {mine.where}; {_LOOK}"
        )
    if rank in late or not late:  # nobody stands out
        return Verdict(waited + describe_posts(posts) + f"; {_LOOK}")
    first = here[late[0]]
    words = (
        f"{waited}{name_ranks(late)} has been in {first.operation} for {first.seconds:.0f} s, at {first.where}; {_LOOK}"
    )
    return Verdict(words, excused=any(here[other].seconds < here[other].limit for other in late))


def explain(error: BaseException) -> Fault:
    """An exception's fault: the first error in its chain of causes that an operator can do something about, else a bug."""
    for cause in _causes(error):
        if isinstance(cause, PeerFault):
            advice = f"see what holds it, and its log, then {RESTART}; or raise --dcp-exchange-timeout"
            return Fault(f"lost another rank ({cause})", advice, is_consequence=True)
        text = _first_sentence(cause)
        if is_out_of_memory(cause):
            advice = "lower --max-num-batched-tokens or --gpu-memory-utilization, or raise -dcp; then " + RESTART
            return Fault(f"ran out of memory ({text})", advice)
        if isinstance(cause, OSError) and cause.errno in _NO_ROOM:
            where = f" {cause.filename}" if cause.filename else ""
            return Fault(
                f"could not write{where} ({cause.strerror})",
                f"make room, or raise the limit (ulimit -f); then {RESTART}",
            )
        if is_failed_collective(cause):
            notes = "; ".join(getattr(cause, "__notes__", []))
            return Fault(
                f"lost the others ({notes or text})", f"see their logs, then {RESTART}", True, _traceback(error)
            )
    return Fault(
        f"failed ({_first_sentence(error)})",
        f"a bug, or a broken installation: keep the traceback above; {RESTART}",
        False,
        _traceback(error),
    )


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in str(error).lower() for words in _NO_MEMORY
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _first_sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    words = re.sub(r"^\[[^]]*\] ", "", lines[0]).partition(". This is typically")[
        0
    ]  # less gloo's source file and advice
    return f"{type(error).__name__}: {words}"[:200]


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def describe_posts(posts: Sequence[Post | None]) -> str:
    """Where everyone is, the smallest group first: it is the odd one out."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, post in enumerate(posts):
        if post:
            groups["left the job" if post.left else f"in {post.operation} at {post.where}"].append(rank)
    smallest = sorted(groups.items(), key=lambda group: len(group[1]))
    return "; ".join(f"{name_ranks(ranks)} {where}" for where, ranks in smallest[:4])
