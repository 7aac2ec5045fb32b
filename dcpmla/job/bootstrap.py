"""Start-up and shutdown of the ranks: launcher -> device -> torch.distributed, and what all ranks must agree on."""

import gc
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dcpmla.job.launch_info import LaunchInfo
from dcpmla.job.launcher import find_launch_info
from dcpmla.job.rendezvous import meet
from dcpmla.parallel.collectives import PeerFault, gather_values

DEVICES = ("auto", "cpu", "cuda")
_LAST_READ = timedelta(seconds=5)  # time that rank 0 waits for the others to read why the job ends
_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True, kw_only=True)
class Ranks(LaunchInfo):
    """This process among the job's ranks.

    Attributes:
        device: Device of its tensors.
    """

    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def origin(self) -> str:
        """The job's ranks, launcher and devices in words, for the user."""
        devices = "GPUs" if self.device.type == "cuda" else "CPUs"
        if self.launcher == "one process":
            return f"one process, started by no launcher, on {devices}"
        ranks = f"{self.num_ranks} ranks, {self.num_local_ranks} of them on this host"
        return f"{ranks}, started by {self.launcher}, on {devices}"


def read_launcher(device: str, timeout: timedelta = timedelta(minutes=1)) -> Ranks:
    """Find out what started this process (torchrun, mpirun, srun or none), which rank it is, and on which device.

    Collective under mpirun.

    Args:
        device: Device option, see `assign_device`.
        timeout: Time limit for the ranks to meet over MPI.
    Raises:
        ValueError: See `assign_device` and `find_launch_info`.
    """
    return assign_device(device, find_launch_info(os.environ, timeout))


def assign_device(device: str, launch: LaunchInfo) -> Ranks:
    """Assign a rank its device: the GPU whose number is its local rank, or the CPU.

    Args:
        device: Device option "cuda", "cpu", or "auto", which takes GPUs where any is visible.
        launch: Rank, whose host must show it a GPU for each of the host's ranks.
    Raises:
        ValueError: An unknown device, or fewer GPUs than ranks on this host.
    """
    if device not in DEVICES:
        raise ValueError(f"device (--device) is {device!r}; choose one of {', '.join(DEVICES)}")
    num_gpus, num_local = torch.cuda.device_count(), launch.num_local_ranks
    if device == "cpu" or (device == "auto" and num_gpus == 0):
        # Libraries that look for GPUs themselves must see none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return Ranks(**vars(launch), device=torch.device("cpu"))
    if num_gpus < num_local:
        hint = (
            "srun --gpus-per-node, no --gpus-per-task, no --gpu-bind"
            if launch.launcher == "srun"
            else "CUDA_VISIBLE_DEVICES"
        )
        raise ValueError(
            f"device (--device) is {device!r}, but a rank sees {num_gpus} GPUs for {num_local} ranks of its host; "
            f"start fewer, let each see the GPUs of all ({hint}), or use --device cpu"
        )
    return Ranks(**vars(launch), device=torch.device("cuda", launch.local_rank))


@contextmanager
def distributed(ranks: Ranks, timeout: timedelta) -> Iterator[dist.Store]:
    """Run a block without a watchdog between `meet` and the shutdown of `process_groups`.

    Args:
        timeout: Time limit for the ranks to meet, and for one collective.
    Yields:
        The job's store over a connection of its own, so that waiting on it blocks no other user. Its keys have a prefix
        that keeps them apart from torch's.
    """
    store = meet(ranks, timeout)
    with process_groups(ranks, store, timeout):
        yield dist.PrefixStore("dcpmla", store.clone())  # type: ignore[attr-defined]


@contextmanager
def process_groups(ranks: Ranks, store: dist.Store, timeout: timedelta) -> Iterator[None]:
    """Initialize torch.distributed (NCCL on GPUs, gloo on CPUs) for a block, and shut it down afterwards.

    A ValueError is raised on every rank (see `agree`), so the groups are shut down after it too. After any other
    exception the peers, if there are any, may be gone and waiting for them could hang, so the groups are left for the
    end of the process.

    Args:
        store: Store where the ranks have met.
        timeout: Time limit for one collective.
    Raises:
        ValueError: The ranks cannot work together.
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
        yield
    except BaseException as error:
        if isinstance(error, ValueError) or ranks.num_ranks == 1:
            # NCCL waits for the end of graphs that hold its operations, and the error's frames hold graphs.
            traceback.clear_frames(error.__traceback__)
            gc.collect()
            dist.destroy_process_group()
        raise
    dist.barrier()
    dist.destroy_process_group()


def _keep_flight_records() -> None:
    """Have NCCL record its last operations, a few hundred kilobytes, and write them to a file when one times out."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the older name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def _check_equal_ranks(store: dist.Store, ranks: Ranks) -> None:
    """Raise ValueError on every rank for differences that would hang in the first collective.

    Collective, over the store.
    """
    store.set(f"kind/{ranks.rank}", f"{ranks.device.type} {torch.__version__}")
    kinds = [kind.decode().split() for kind in store.multi_get([f"kind/{rank}" for rank in range(ranks.num_ranks)])]
    store.set(f"has read/{ranks.rank}", "")
    try:
        _raise_difference([{"device (--device)": device, "torch's version": version} for device, version in kinds])
    except ValueError:
        if ranks.rank == 0:  # it may serve the store, which others still have to read
            with suppress(dist.DistError):
                store.wait([f"has read/{rank}" for rank in range(ranks.num_ranks)], _LAST_READ)
        raise


def check_equal_arguments(arguments: Mapping[str, object]) -> None:
    """Refuse to go on where the ranks were started with different arguments; values are compared by `repr`.

    Collective.

    Raises:
        ValueError: An argument differs; every rank names it, the first rank that differs from rank 0, and both values.
    """
    own = {name: repr(value) for name, value in arguments.items()}
    _raise_difference(gather_values(own, None, "comparing arguments"))


def _raise_difference(everyone: Sequence[Mapping[str, str]]) -> None:
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for name in [*first, *other]:
            mine, theirs = first.get(name, "missing"), other.get(name, "missing")
            if mine != theirs:
                start = max(0, len(os.path.commonprefix([mine, theirs])) - _SHOWN // 2)
                raise ValueError(
                    f"{name} differs between ranks: {_shown(mine, start)} on rank 0, {_shown(theirs, start)} on rank "
                    f"{rank}; start all ranks with the same"
                )


def _shown(value: str, start: int) -> str:
    """Cut a long value down to the part where the difference starts."""
    return ("..." if start else "") + value[start : start + _SHOWN] + ("..." if len(value) > start + _SHOWN else "")


@contextmanager
def agree() -> Iterator[None]:
    """Run a block in which any rank may raise ValueError: every rank then raises the first such rank's error.

    Collective. A mistake that only some ranks can see (a file, a shard of a checkpoint) thus ends the whole job with
    one message instead of a hang. Any other exception stays the rank's own, and the others raise PeerFault.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # any exception, because the other ranks wait below
        error = caught
    is_fault = error is not None and not isinstance(error, ValueError)
    own = is_fault, "" if error is None else str(error) or repr(error)
    reports = gather_values(own, None, "agreeing on mistakes")
    if error is not None and is_fault:
        raise error
    for rank, (other_is_fault, message) in enumerate(reports):
        if other_is_fault:
            raise PeerFault(f"rank {rank} failed: {message}") from error
    message = next((message for _, message in reports if message), None)
    if message:
        raise ValueError(message) from error
