"""Facts that `doctor` reports of each rank: versions, device, kernels and connections."""

import ctypes
import os
import platform
import socket
from dataclasses import dataclass

import torch
import torch.distributed._symmetric_memory as symmetric_memory

from dcpmla.attention.backends.choice import DECODE_BACKENDS, PREFILL_BACKENDS, passed_over, select_backend
from dcpmla.bench.results import installed, versions
from dcpmla.cli.self_tests import decode_call, prefill_calls
from dcpmla.comm.reach import Nvml, find_peers, gpu_uuid
from dcpmla.config import MLAConfig
from dcpmla.job.bootstrap import Ranks


@dataclass(frozen=True)
class RankFacts:
    """Versions, device and kernels of one rank.

    Attributes:
        name: Name of the GPU, or of the CPU's architecture.
        memory_bytes: Memory of the GPU, or of the host.
        num_nvlinks: Number of the GPU's active NVLinks; None without NVML (pynvml).
        decode, prefill: Backends that run the calls of the self-tests there, in bfloat16 (float32 on CPUs).
        passed_over: Reasons against each backend before these, by phase and name.
        symmetric_memory: Backend that torch uses for it on the device, None without one.
        peers: Connections of the host's GPUs (`find_peers`), on each host's first rank; None on others.
    """

    rank: int
    host: str
    device: str
    name: str
    memory_bytes: int
    compute_capability: str | None
    multiprocessors: int | None
    num_nvlinks: int | None
    decode: str
    prefill: str
    passed_over: dict[str, dict[str, str]]
    symmetric_memory: str | None
    peers: list[list[str]] | None
    versions: dict[str, str | None]

    def describe(self) -> str:
        """Return a line for people."""
        words = [f"{self.device} of {self.host}, {self.name}, {self.memory_bytes / 2**30:.0f} GiB"]
        if self.compute_capability:
            words.append(f"compute capability {self.compute_capability}, {self.multiprocessors} multiprocessors")
        if self.num_nvlinks is not None:
            words.append(f"{self.num_nvlinks} NVLinks")
        memory = f"symmetric memory {self.symmetric_memory}" if self.symmetric_memory else "no symmetric memory"
        return f"rank {self.rank}: {', '.join(words)}; kernels: decode {self.decode}, prefill {self.prefill}; {memory}"


def find_facts(ranks: Ranks, config: MLAConfig, dtype: torch.dtype) -> RankFacts:
    """Return the facts of this rank; attention is the model's of config."""
    device, on_gpu = ranks.device, ranks.device.type == "cuda"
    gpu = torch.cuda.get_device_properties(device) if on_gpu else None
    nvml = Nvml() if on_gpu else None
    decode, prefill = decode_call(config, device, dtype), prefill_calls(config, device, dtype)["causal"]
    return RankFacts(
        rank=ranks.rank,
        host=socket.gethostname(),
        device=str(device),
        name=gpu.name if gpu else f"CPU {platform.machine()}",
        memory_bytes=gpu.total_memory if gpu else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        compute_capability=f"{gpu.major}.{gpu.minor}" if gpu else None,
        multiprocessors=gpu.multi_processor_count if gpu else None,
        num_nvlinks=nvml.num_nvlinks(gpu_uuid(device)) if nvml else None,
        decode=select_backend(DECODE_BACKENDS, decode).name,
        prefill=select_backend(PREFILL_BACKENDS, prefill).name,
        passed_over={
            "decode": passed_over(DECODE_BACKENDS, decode),
            "prefill": passed_over(PREFILL_BACKENDS, prefill),
        },
        symmetric_memory=symmetric_memory.get_backend(device),
        peers=find_peers(nvml) if nvml and ranks.local_rank == 0 else None,
        versions=_find_versions(on_gpu),
    )


def _find_versions(on_gpu: bool) -> dict[str, str | None]:
    packages = {"dcpmla": installed("dcpmla"), "python": platform.python_version(), **versions()}
    if on_gpu:
        packages |= {"cuda": torch.version.cuda, "cuda driver": _cuda_driver()}
    flashinfer = installed("flashinfer-python")
    return {**packages, "flashinfer": flashinfer} if flashinfer else packages


def _cuda_driver() -> str | None:
    """Return the newest CUDA that the driver takes, which torch does not report."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"
