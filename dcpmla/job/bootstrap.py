"""Start-up and shutdown: the launcher's ranks -> torch.distributed, one context manager; and what all ranks must agree
on.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dcpmla.job.launcher import LaunchInfo, find_launch_info
from dcpmla.job.rendezvous import meet
from dcpmla.parallel.collectives import PeerFault

DEVICES = ("auto", "cpu", "cuda")
_LAST_READ = timedelta(seconds=5)  # for ranks that are as far as this one
_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True, kw_only=True)
class Ranks(LaunchInfo):
    """This process among the job's. `device` is where its tensors live."""

    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def origin(self) -> str:
        """Who started the job, and where, for people."""
        devices = "GPUs" if self.device.type == "cuda" else "CPUs"
        if self.launcher == "one process":
            return f"one process, started by no launcher, on {devices}"
        return f"{self.num_ranks} ranks, {self.num_local_ranks} of them on this host, started by {self.launcher}, on {devices}"


def read_launcher(device: str, timeout: timedelta = timedelta(minutes=1)) -> Ranks:
    """Who started this process (torchrun, mpirun, srun or nobody), its place among the ranks, and its device. A
    collective under mpirun.

    Args:
        device: as in `assign_device`.
        timeout: of the ranks' meeting over MPI.
    Raises:
        ValueError: as `assign_device` and `find_launch_info` do.
    """
    return assign_device(device, find_launch_info(os.environ, timeout))


def assign_device(device: str, place: LaunchInfo) -> Ranks:
    """Give a rank its device: the GPU of its number on the host, which must see one for each of its ranks, or its CPUs.

    Args:
        device: "cuda", "cpu", or "auto": GPUs where any is seen.
    Raises:
        ValueError: an unknown device, or fewer GPUs than ranks of this host.
    """
    if device not in DEVICES:
        raise ValueError(f"device (--device) is {device!r}; choose one of {', '.join(DEVICES)}")
    num_gpus, num_local = torch.cuda.device_count(), place.num_local_ranks
    if device == "cpu" or (device == "auto" and num_gpus == 0):
        # transformers puts a tensor-parallel model on the accelerator that it sees: now it must see none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return Ranks(**vars(place), device=torch.device("cpu"))
    if num_gpus < num_local:
        hint = (
            "srun --gpus-per-node, no --gpus-per-task, no --gpu-bind"
            if place.launcher == "srun"
            else "CUDA_VISIBLE_DEVICES"
        )
        raise ValueError(
            f"device (--device) is {device!r}, but a rank sees {num_gpus} GPUs for {num_local} ranks of its host; start fewer, "
            f"let each see the GPUs of all ({hint}), or use --device cpu"
        )
    return Ranks(**vars(place), device=torch.device("cuda", place.local_rank))


@contextmanager
def distributed(ranks: Ranks, timeout: timedelta) -> Iterator[dist.Store]:
    """`meet` and `process_groups` in one, for a block that nobody watches.

    Args:
        timeout: of the ranks' meeting, and of one collective.
    Yields:
        The job's store, over a connection of its own: whoever waits there holds up nobody else. Its keys are apart
        from torch's.
    """
    store = meet(ranks, timeout)
    with process_groups(ranks, store, timeout):
        yield dist.PrefixStore("dcpmla", store.clone())  # type: ignore[attr-defined]


@contextmanager
def process_groups(ranks: Ranks, store: dist.Store, timeout: timedelta) -> Iterator[None]:
    """Initialize torch.distributed for the block, NCCL on GPUs and gloo on CPU, and shut it down after it.

    Under mpirun and srun torchrun's variables are set meanwhile, because transformers' tensor-parallel loading
    reads them.

    A ValueError is every rank's (see `agree`), so the groups are shut down for it too. After any other exception
    the peers may be gone and waiting for them would hang, so where there are any the groups are left to the end of the
    process.

    Args:
        store: where the ranks have met.
        timeout: of one collective.
    Raises:
        ValueError: ranks that cannot work together.
    """
    on_gpu = ranks.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(ranks.device)
    _keep_flight_records()
    _check_equal_ranks(dist.PrefixStore("ranks", store), ranks)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.num_ranks,
        timeout=timeout,
        device_id=ranks.device if on_gpu else None,
    )
    try:
        with _torchrun_s_variables(ranks):
            yield
    except BaseException as error:
        if isinstance(error, ValueError) or ranks.num_ranks == 1:
            dist.destroy_process_group()
        raise
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _torchrun_s_variables(place: LaunchInfo) -> Iterator[None]:
    """Only for a while: a later `find_launch_info` would take them for torchrun's."""
    if place.launcher not in ("mpirun", "srun"):
        yield
        return
    numbers = {
        "RANK": place.rank,
        "WORLD_SIZE": place.num_ranks,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.num_local_ranks,
    }
    os.environ.update({name: str(number) for name, number in numbers.items()})
    try:
        yield
    finally:
        for name in numbers:
            del os.environ[name]


def _keep_flight_records() -> None:
    """NCCL's last operations in a ring that is written to a file when one times out: its price is a few hundred
    kilobytes.
    """
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the older name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def _check_equal_ranks(store: dist.Store, ranks: Ranks) -> None:
    """What would hang in the first collective. Collective."""
    store.set(f"kind/{ranks.rank}", f"{ranks.device.type} {torch.__version__}")
    kinds = [kind.decode().split() for kind in store.multi_get([f"kind/{rank}" for rank in range(ranks.num_ranks)])]
    store.set(f"has read/{ranks.rank}", "")
    try:
        _raise_difference([{"device (--device)": device, "torch's version": version} for device, version in kinds])
    except ValueError:
        if ranks.rank == 0:  # it may hold the store, in which others still read what is wrong
            with suppress(dist.DistError):
                store.wait([f"has read/{rank}" for rank in range(ranks.num_ranks)], _LAST_READ)
        raise


def check_equal_arguments(arguments: Mapping[str, object]) -> None:
    """Collective: nobody goes on where ranks were started with different arguments. Equal is what has equal `repr`.

    Raises:
        ValueError: the same on every rank: the argument, the first rank that differs from rank 0, and both values.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: repr(value) for name, value in arguments.items()})
    _raise_difference(everyone)


def _raise_difference(everyone: Sequence[Mapping[str, str]]) -> None:
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for name in [*first, *other]:
            mine, theirs = first.get(name, "missing"), other.get(name, "missing")
            if mine != theirs:
                start = max(0, len(os.path.commonprefix([mine, theirs])) - _SHOWN // 2)
                raise ValueError(
                    f"{name} differs between ranks: {_shown(mine, start)} on rank 0, {_shown(theirs, start)} on rank {rank}; "
                    "start all ranks with the same"
                )


def _shown(value: str, start: int) -> str:
    """A long value from where it begins to matter."""
    return ("..." if start else "") + value[start : start + _SHOWN] + ("..." if len(value) > start + _SHOWN else "")


@contextmanager
def agree() -> Iterator[None]:
    """Run a block that any rank's ValueError may end: then every rank raises the ValueError of the first rank that
    has one.

    Collective. A mistake that only some ranks can see (a file, a shard of a checkpoint) so ends the whole job with
    one message, not a hang. Any other exception stays the rank's own; the others raise a PeerFault.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # also what is no user's mistake: the other ranks wait below
        error = caught
    is_fault = error is not None and not isinstance(error, ValueError)
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (is_fault, "" if error is None else str(error) or repr(error)))
    if error is not None and is_fault:
        raise error
    for rank, (other_is_fault, message) in enumerate(reports):
        if other_is_fault:
            raise PeerFault(f"rank {rank} failed: {message}") from error
    message = next((message for _, message in reports if message), None)
    if message:
        raise ValueError(message) from error
