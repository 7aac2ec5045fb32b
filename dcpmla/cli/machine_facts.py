"""What `doctor` finds on a rank: its versions and device, the kernels that run there, how its host's GPUs reach each other."""

import ctypes
import importlib
import platform
import socket
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed._symmetric_memory as symmetric_memory

from dcpmla.attention.backends import select_decode
from dcpmla.attention.prefill_backends import select_prefill
from dcpmla.cli.results import installed, versions
from dcpmla.config import MLAConfig
from dcpmla.parallel.bootstrap import Ranks


@dataclass(frozen=True)
class RankFacts:
    """One rank's.

    Attributes:
        name: of the GPU, or of the architecture of the CPU.
        memory_bytes: of the GPU, or of the host.
        num_nvlinks: active ones of the GPU; None where NVML (pynvml) does not tell.
        decode, prefill: the kernels that attention of DeepSeek's sizes takes there, in bfloat16 (float32 on CPUs).
        symmetric_memory: torch's backend of it for the device, None without one.
        peers: [i][j] how GPU i of the host reaches GPU j: "NVLink", "peer access", "no"; "-" is itself. None but on each host's first rank.
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
    symmetric_memory: str | None
    peers: list[list[str]] | None
    versions: dict[str, str | None]


def find_facts(ranks: Ranks, config: MLAConfig, dtype: torch.dtype) -> RankFacts:
    """This rank's; attention as the model's of config."""
    device, on_gpu = ranks.device, ranks.device.type == "cuda"
    gpu = torch.cuda.get_device_properties(device) if on_gpu else None
    nvml = Nvml() if on_gpu else None
    decode, prefill = _select_kernels(config, device, dtype)
    return RankFacts(
        rank=ranks.rank,
        host=socket.gethostname(),
        device=str(device),
        name=gpu.name if gpu else f"CPU {platform.machine()}",
        memory_bytes=gpu.total_memory if gpu else psutil.virtual_memory().total,
        compute_capability=f"{gpu.major}.{gpu.minor}" if gpu else None,
        multiprocessors=gpu.multi_processor_count if gpu else None,
        num_nvlinks=nvml.num_nvlinks(torch.cuda.current_device()) if nvml else None,
        decode=decode,
        prefill=prefill,
        symmetric_memory=symmetric_memory.get_backend(device),
        peers=find_peers(nvml) if nvml and ranks.local_rank == 0 else None,
        versions=_find_versions(on_gpu),
    )


def _find_versions(on_gpu: bool) -> dict[str, str | None]:
    found = {"dcpmla": installed("dcpmla"), "python": platform.python_version(), **versions()}
    if on_gpu:
        found |= {"cuda": torch.version.cuda, "cuda driver": _cuda_driver()}
    flashinfer = installed("flashinfer-python")
    return {**found, "flashinfer": flashinfer} if flashinfer else found


def _cuda_driver() -> str | None:
    """The newest CUDA that the driver takes; torch does not tell it."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _select_kernels(config: MLAConfig, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Names of the decode and the prefill kernel, by asking the tables."""

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    heads, rope = config.num_heads, config.qk_rope_head_dim
    decode = select_decode(new(1, heads, config.latent_dim), new(1, 64, config.latent_dim), config.kv_lora_rank)
    prefill = select_prefill(new(1, heads, config.qk_head_dim), new(1, rope), new(1, heads, config.v_head_dim))
    return decode.name, prefill.name


def find_peers(nvml: "Nvml") -> list[list[str]]:
    """`RankFacts.peers`, between all GPUs that this process sees."""
    gpus = range(torch.cuda.device_count())

    def link(one: int, other: int) -> str:
        if one == other:
            return "-"
        if not torch.cuda.can_device_access_peer(one, other):
            return "no"
        return "NVLink" if nvml.has_nvlink(one, other) else "peer access"

    return [[link(one, other) for other in gpus] for one in gpus]


class Nvml:
    """NVLinks of the GPUs that torch sees, by its index, where pynvml is installed and the driver answers (for a MIG slice it does not)."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        try:
            self._nvml = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            self._nvml.nvmlInit()
            uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())]
            self._handles = [self._nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        except self._nvml.NVMLError:
            return

    def num_nvlinks(self, index: int) -> int | None:
        """Active ones of a GPU; None where NVML does not tell."""
        if not self._handles:
            return None
        return sum(self._is_active(index, link) for link in range(self._nvml.NVML_NVLINK_MAX_LINKS))

    def has_nvlink(self, one: int, other: int) -> bool:
        """Whether two GPUs are known to reach each other over NVLink."""
        if not self._handles:
            return False
        try:
            status = self._nvml.nvmlDeviceGetP2PStatus(self._handles[one], self._handles[other], self._nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        except self._nvml.NVMLError:
            return False
        return status == self._nvml.NVML_P2P_STATUS_OK

    def _is_active(self, index: int, link: int) -> bool:
        try:
            return self._nvml.nvmlDeviceGetNvLinkState(self._handles[index], link) == self._nvml.NVML_FEATURE_ENABLED
        except self._nvml.NVMLError:  # a GPU has fewer links than NVML may count
            return False
