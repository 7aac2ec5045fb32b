"""What `doctor` finds on a rank: its versions and device, the kernels that run there, how its host's GPUs reach each
other.
"""

import ctypes
import platform
import socket
from dataclasses import dataclass

import psutil
import torch
import torch.distributed._symmetric_memory as symmetric_memory

from dcpmla.attention.backends import DECODE_BACKENDS, PREFILL_BACKENDS, select_backend
from dcpmla.attention.calls import DecodeCall, PrefillCall, Segments
from dcpmla.bench.results import installed, versions
from dcpmla.comm.reach import Nvml, find_peers, gpu_uuid
from dcpmla.config import MLAConfig
from dcpmla.job.bootstrap import Ranks


@dataclass(frozen=True)
class RankFacts:
    """One rank's.

    Attributes:
        name: of the GPU, or of the architecture of the CPU.
        memory_bytes: of the GPU, or of the host.
        num_nvlinks: active ones of the GPU; None where NVML (pynvml) does not tell.
        decode, prefill: the kernels that attention of DeepSeek's sizes takes there, in bfloat16 (float32 on CPUs).
        symmetric_memory: torch's backend of it for the device, None without one.
        peers: of the host's GPUs, as `find_peers` gives them; None but on each host's first rank.
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
        num_nvlinks=nvml.num_nvlinks(gpu_uuid(device)) if nvml else None,
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
    numbers = torch.zeros(1, dtype=torch.int32, device=device)
    sizes = numbers[None], numbers, config.scale, config.kv_lora_rank
    decode = DecodeCall.check(new(1, heads, config.latent_dim), new(1, 64, config.latent_dim), *sizes)
    keys = new(1, heads, config.qk_nope_head_dim), new(1, rope), new(1, heads, config.v_head_dim)
    rows = Segments((0, 1), numbers)
    prefill = PrefillCall(new(1, heads, config.qk_head_dim), *keys, rows, rows, config.scale, causal=True)
    return select_backend(DECODE_BACKENDS, decode).name, select_backend(PREFILL_BACKENDS, prefill).name
