"""A job from its start to its end: the ranks meet, are watched, hold process groups, and part."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from dcpmla.job.bootstrap import Ranks, assign_device, check_equal_arguments, process_groups
from dcpmla.job.launch_info import LaunchInfo
from dcpmla.job.launcher import find_launch_info
from dcpmla.job.rendezvous import agree_at, meet
from dcpmla.job.watchdog import Reported, Watchdog

TIMEOUT = 60  # seconds that a step may take, where nothing else is asked for
LOAD_TIMEOUT = 1800.0  # seconds that a rank may take to download or read its part of a checkpoint, or to write results
_LINGER = 1.0  # seconds that rank 0, which may hold the store, stays for the others' last posts


class NoWatchdog:
    """A no-op watchdog for a job of one process, whose signals and exceptions stay its own."""

    def enter(self, operation: str, timeout: float | None = None) -> None:
        """Do nothing."""

    def on_stop(self, callback: Callable[[], object]) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Job:
    """This process among the ranks of a job, torch.distributed initialized."""

    ranks: Ranks
    watchdog: Watchdog | NoWatchdog


@contextmanager
def join_ranks(
    device: str,
    timeout: float,
    arguments: Mapping[str, object],
    check: Callable[[LaunchInfo], object] = lambda _: None,
    watch_one: bool = True,
) -> Iterator[Job]:
    """Join the ranks that a launcher started, check that they were asked for the same, and part at the end.

    Args:
        device: Device option, see `assign_device`.
        timeout: Seconds in a step after which a rank counts as lost.
        arguments: Arguments that must be equal on all ranks.
        check: Function that raises a ValueError for a launch that the program cannot use, before anything is started.
        watch_one: Whether to watch a job of one process, too: its faults then end it with one line.
    Raises:
        ValueError: A launcher's variables that contradict each other, no such device, unequal arguments, or check's.
            `Reported` where a watchdog has said it.
        ConnectionError: The ranks did not meet.
    """
    # The watchdog speaks first: torch's own limit is for a rank whose watchdog cannot.
    limit = timedelta(seconds=LOAD_TIMEOUT + 2 * timeout)
    with _met(timeout, watch_one) as (launch, store, watchdog):
        with agree_at(store, launch):
            check(launch)
            ranks = assign_device(device, launch)
        with _one_voice(ranks), process_groups(ranks, store, limit):
            watchdog.enter("comparing arguments")
            check_equal_arguments(arguments)
            yield Job(ranks, watchdog)
            watchdog.enter("shutdown")


def share_mistake(mistake: ValueError) -> None:
    """End the job for a mistake that this rank found before the ranks met: they meet for it, and one rank reports it.

    Raises:
        Reported: The mistake is reported.
        ValueError, ConnectionError: The ranks cannot meet; the mistake is not reported.
    """
    with _met(TIMEOUT, watch_one=True) as (launch, store, _), agree_at(store, launch):
        raise mistake


@contextmanager
def _met(timeout: float, watch_one: bool) -> Iterator[tuple[LaunchInfo, dist.Store, Watchdog | NoWatchdog]]:
    launch = find_launch_info(os.environ, timedelta(seconds=timeout))
    store = meet(launch, timedelta(seconds=timeout))
    if launch.num_ranks == 1 and not watch_one:
        yield launch, store, NoWatchdog()
        return
    try:
        with Watchdog(store, launch.rank, launch.num_ranks, timeout) as watchdog:
            yield launch, store, watchdog
    except Reported:
        if launch.rank == 0 and launch.num_ranks > 1:
            time.sleep(_LINGER)
        raise


def check_num_ranks(launch: LaunchInfo, tensor_parallel_size: int | None) -> None:
    """Raise ValueError unless the launcher started tensor_parallel_size ranks; None accepts any number."""
    if tensor_parallel_size not in (None, launch.num_ranks):
        raise ValueError(
            f"tensor_parallel_size (-tp) is {tensor_parallel_size}, but {launch.num_ranks} ranks were started; "
            f"start torchrun with --nproc-per-node {tensor_parallel_size}, or set -tp {launch.num_ranks}"
        )


@contextmanager
def _one_voice(ranks: Ranks) -> Iterator[None]:
    """Log nothing but errors on other ranks than the first."""
    before = logging.root.manager.disable
    if not ranks.is_first:
        logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
