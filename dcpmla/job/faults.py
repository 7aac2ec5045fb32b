"""Faults in one line for the operator, from the ranks' last reports or from an exception. Pure functions."""

import errno
import json
import re
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from dcpmla.parallel.collectives import PeerFault, is_failed_collective, name_ranks

RESTART = "run the same command again"
_LOOK = f"see what holds it there, then {RESTART}; or raise --timeout"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Words of CUDA, torch's CPU allocator, C++ and cuBLAS.
_NO_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc", "alloc_failed")


@dataclass(frozen=True)
class Post:
    """A rank's last report of itself.

    Attributes:
        beat: Counter of posts; while it does not grow, the process is gone or stopped.
        count: Operations entered so far. All ranks enter the same ones in the same order, so a lower count means that
            the rank lags.
        operation: The rank's current work.
        seconds: Time in the operation so far.
        limit: Seconds that the operation may take.
        line: Line of code that the main thread is at.
        waits: Whether that line is in a collective.
        left: Whether the rank has ended in order.
        failed: Whether the rank has found a fault and is about to end.
    """

    beat: int
    count: int
    operation: str
    seconds: float
    limit: float
    line: str
    waits: bool
    left: bool
    failed: bool


def read_post(text: bytes) -> Post | None:
    """Return a post from the store; None for a value of another program or a broken one."""
    try:
        post = Post(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None
    types = {field.name: (float, int) if field.type is float else (field.type,) for field in fields(Post)}
    return post if all(type(getattr(post, name)) in allowed for name, allowed in types.items()) else None


@dataclass(frozen=True)
class Verdict:
    """The reason why a rank waits too long; `excused` while the ranks it waits for are within their own limits."""

    words: str
    excused: bool = False


@dataclass(frozen=True)
class Fault:
    """An exception as the operator reads it: "rank 1 `what` in decode step 17: `advice`"."""

    what: str
    advice: str
    is_consequence: bool = False  # most likely of another rank's fault
    details: str = ""
    code: int = 1  # the process's exit code


def find_missing(before: Sequence[Post | None], after: Sequence[Post | None]) -> list[int]:
    """List the ranks that posted nothing between two reads of all posts, or never; ranks that left are not missing."""
    pairs = enumerate(zip(before, after, strict=True))
    return [
        rank for rank, (old, new) in pairs if new is None or (old is not None and old.beat == new.beat and not new.left)
    ]


def describe_missing(missing: Sequence[int], posts: Sequence[Post | None], ages: Sequence[float]) -> str:
    """Describe the missing ranks, when and where the first was last seen, and what to do."""
    last = posts[missing[0]]
    seen = f"last seen {ages[missing[0]]:.0f} s ago in {last.operation}, at {last.line}" if last else "it never came"
    return (
        f"{name_ranks(missing)} is missing, {seen}; its process or host is gone or stopped: see its log, then {RESTART}"
    )


def blame(
    rank: int, posts: Sequence[Post | None], missing: Sequence[int], timeout: float, ages: Sequence[float]
) -> Verdict:
    """Say why a rank waits: ranks are missing or, once its operation is past its limit, some ranks lag.

    Args:
        rank: Rank that waits.
        posts: Last posts by rank; None for a rank that never came.
        missing: Ranks that no longer post.
        timeout: Seconds without a post after which a rank is given up.
        ages: Seconds since each rank's last new post (`Board.ages`).
    """
    mine = posts[rank]
    assert mine is not None
    waited = f"rank {rank} waited {mine.seconds:.0f} s in {mine.operation}: "
    if missing:
        excused = all(posts[other] is not None and ages[other] < timeout for other in missing)
        return Verdict(waited + describe_missing(missing, posts, ages), excused)
    if mine.seconds < mine.limit:
        return Verdict("", excused=True)
    here = {other: post for other, post in enumerate(posts) if post and not post.left}
    lagging = [other for other, post in here.items() if post.count < mine.count]
    busy = [other for other, post in here.items() if post.count == mine.count and not post.waits]
    late = lagging or busy
    if rank in late and (len(late) < len(here) or len(posts) == 1):
        return Verdict(
            f"rank {rank} has not come back from {mine.operation} for {mine.seconds:.0f} s, at {mine.line}; {_LOOK}"
        )
    if rank in late or not late:  # all ranks are late, or none is
        return Verdict(waited + describe_posts(posts) + f"; {_LOOK}")
    first = here[late[0]]
    words = (
        f"{waited}{name_ranks(late)} has been in {first.operation} for {first.seconds:.0f} s, at {first.line}; {_LOOK}"
    )
    return Verdict(words, excused=any(here[other].seconds < here[other].limit for other in late))


def explain(error: BaseException) -> Fault:
    """Turn an exception into a fault: the first of its chain of causes that an operator can act on, or else a bug."""
    for cause in _causes(error):
        if isinstance(cause, PeerFault):
            advice = f"see what holds it, and its log, then {RESTART}; or raise --dcp-exchange-timeout"
            return Fault(f"lost another rank ({cause})", advice, is_consequence=True)
        text = _first_sentence(cause)
        if is_out_of_memory(cause):
            advice = "lower --max-num-batched-tokens or --gpu-memory-utilization, or raise -dcp; then " + RESTART
            return Fault(f"ran out of memory ({text})", advice)
        if isinstance(cause, OSError) and cause.errno in _NO_ROOM:
            path = f" {cause.filename}" if cause.filename else ""
            return Fault(
                f"could not write{path} ({cause.strerror})",
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
    """Return whether an error is a failed allocation, on the CPU or on a GPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in str(error).lower() for words in _NO_MEMORY
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, the one it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _first_sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    words = re.sub(r"^\[[^]]*\] ", "", lines[0])  # gloo's source file
    words = words.partition(". This is typically")[0]  # gloo's advice
    return f"{type(error).__name__}: {words}"[:200]


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def describe_posts(posts: Sequence[Post | None]) -> str:
    """Say where all ranks are, the smallest group first, since it is the odd one out."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, post in enumerate(posts):
        if post:
            groups["left the job" if post.left else f"in {post.operation} at {post.line}"].append(rank)
    smallest = sorted(groups.items(), key=lambda group: len(group[1]))
    return "; ".join(f"{name_ranks(ranks)} {state}" for state, ranks in smallest[:4])
