"""Reachability of GPUs: NVLinks as NVML reports them, and whether all ranks of a group can store into each other's
memory.
"""

import importlib
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed import ProcessGroup

from dcpmla.parallel.collectives import gather_values

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class GpuSite:
    """The host and GPU that a rank runs on.

    Attributes:
        rank: Number in the job.
        host: Identity of the host, unique even if hosts share a name.
        gpu: UUID; "" on a CPU.
        has_symmetric_memory: Whether torch has symmetric memory for the device.
    """

    rank: int
    host: str
    gpu: str
    has_symmetric_memory: bool


def reach(group: ProcessGroup, device: torch.device) -> str:
    """Find out why the ranks of a group cannot store into each other's GPU memory over NVLink. Collective.

    Args:
        device: Device of this rank; the other ranks' GPUs need not be visible.
    Returns:
        "" if they can, else a short phrase for messages, the obstacle. The same on every rank.
    """
    on_gpu = device.type == "cuda"
    host = f"{socket.gethostname()} {_BOOT_ID.read_text() if _BOOT_ID.exists() else ''}"
    gpu = gpu_uuid(device) if on_gpu else ""
    site = GpuSite(dist.get_rank(), host, gpu, on_gpu and symmetric_memory.get_backend(device) is not None)
    sites = [GpuSite(**fields) for fields in gather_values(asdict(site), group, "reach")]
    return judge_sites(sites) or judge_links(
        sites, gather_values(find_missing(gpu, [other.gpu for other in sites]), group, "reach")
    )


def judge_sites(sites: Sequence[GpuSite]) -> str:
    """Return the obstacle (`reach`) that the sites show; "" if each rank has a GPU of its own on the same host."""
    if not all(site.gpu for site in sites):
        return "the ranks are CPUs"
    for one, other in combinations(sites, 2):
        if one.host != other.host:
            return f"ranks {one.rank} and {other.rank} are on different hosts"
        if one.gpu == other.gpu:
            return f"ranks {one.rank} and {other.rank} share a GPU"
    lacking = next((site for site in sites if not site.has_symmetric_memory), None)
    return f"torch has no symmetric memory for the GPU of rank {lacking.rank}" if lacking else ""


def judge_links(sites: Sequence[GpuSite], missing: Sequence[Sequence[str]]) -> str:
    """Return the obstacle (`reach`) that the links show; missing[i][j] is the result of `find_missing` on rank i for
    the GPU of rank j.
    """
    for one, of_one in zip(sites, missing, strict=True):
        for other, words in zip(sites, of_one, strict=True):
            if words:
                return f"the GPUs of ranks {one.rank} and {other.rank} have {words}"
    return ""


def find_missing(mine: str, gpus: Sequence[str]) -> list[str]:
    """Return what a GPU lacks to reach each GPU of its host over NVLink, "" for nothing. UUIDs identify GPUs, because a
    process may see only its own GPU.
    """
    nvml, visible = Nvml(), [gpu_uuid(index) for index in range(torch.cuda.device_count())]

    def missing(other: str) -> str:
        if other == mine:
            return ""
        if other in visible and not torch.cuda.can_device_access_peer(visible.index(mine), visible.index(other)):
            return "no peer access to each other"
        has_nvlink = nvml.has_nvlink(mine, other)
        if has_nvlink is None:
            return "no NVLink that NVML tells of (it is asked through the package nvidia-ml-py)"
        return "" if has_nvlink else "no NVLink between them"

    return [missing(other) for other in gpus]


def find_peers(nvml: "Nvml") -> list[list[str]]:
    """Return the links from GPU i of this process to GPU j at [i][j]: "NVLink", "peer access", "no", "-" for i = j."""
    gpus = range(torch.cuda.device_count())

    def link(one: int, other: int) -> str:
        if one == other:
            return "-"
        if not torch.cuda.can_device_access_peer(one, other):
            return "no"
        return "NVLink" if nvml.has_nvlink(gpu_uuid(one), gpu_uuid(other)) else "peer access"

    return [[link(one, other) for other in gpus] for one in gpus]


def gpu_uuid(device: torch.device | int) -> str:
    """Return the UUID of a GPU that this process sees, as NVML writes it."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


class Nvml:
    """NVLinks of the host's GPUs, by UUID, where pynvml is installed and the driver answers (for a MIG slice it does
    not).
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return
        self._nvml = nvml

    def num_nvlinks(self, gpu: str) -> int | None:
        """Count the active links of a GPU; return None if NVML gives no answer."""
        handle = self._handle(gpu)
        if handle is None:
            return None
        # NVML's maximum exceeds the GPU's number of links: there is no answer for the rest.
        states = [
            self._ask("nvmlDeviceGetNvLinkState", handle, link) for link in range(self._nvml.NVML_NVLINK_MAX_LINKS)
        ]
        return states.count(self._nvml.NVML_FEATURE_ENABLED)

    def has_nvlink(self, one: str, other: str) -> bool | None:
        """Return whether NVLink connects two GPUs, directly or through switches; None if NVML gives no answer."""
        handles = self._handle(one), self._handle(other)
        if any(handle is None for handle in handles):
            return None
        status = self._ask("nvmlDeviceGetP2PStatus", *handles, self._nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        return None if status is None else status == self._nvml.NVML_P2P_STATUS_OK

    def _handle(self, gpu: str) -> Any:
        """Return NVML's handle; None if NVML is not available, or does not know the GPU."""
        return None if self._nvml is None else self._ask("nvmlDeviceGetHandleByUUID", gpu)

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Return the answer of one of NVML's functions; None if there is none."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError:
            return None
