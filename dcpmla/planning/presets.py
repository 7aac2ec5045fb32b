"""Machines by name: 1 to 16 H100, H200 or B200 GPUs (`PRESETS`).

Sources: NVIDIA's datasheets of H100 SXM, H200 SXM and HGX B200: memory bandwidth, dense bf16 products, and NVLink each
way, which is half of the published sum. Memory is what the driver shows.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from dcpmla.planning.machine import COLLECTIVES, H200X8, Machine

_NUM_GPUS = (1, 2, 4, 8, 16)
_PER_NODE = 8


class _Sheet(NamedTuple):
    """Published numbers of a GPU: GiB of memory, GB/s of memory, TFLOP/s of bf16, GB/s of NVLink each way."""

    memory_gib: int
    hbm_gb_per_s: float
    matmul_tflops: float
    nvlink_gb_per_s: float


_H200 = _Sheet(139, 4800, 989, 450)
_SHEETS = {"h100": _Sheet(79, 3350, 989, 450), "b200": _Sheet(178, 8000, 2250, 900)}
_OTHER_KERNELS = {"b200": "; this package has no kernels of its own for it, and Triton's were not measured there"}


def _of_sheet(gpu: str, sheet: _Sheet) -> Machine:
    """Return 8 GPUs of a kind that was not measured: they reach the same shares of the published rates as H200s, with
    the same latencies.
    """
    hbm, products, links = (
        getattr(sheet, name) / getattr(_H200, name) for name in ("hbm_gb_per_s", "matmul_tflops", "nvlink_gb_per_s")
    )
    changes: dict[str, Any] = {
        name: replace(getattr(H200X8, name), gb_per_s=links * getattr(H200X8, name).gb_per_s)
        for name in (*COLLECTIVES, "direct")
    }
    return replace(
        H200X8,
        source=f"from the datasheet, at the shares that H200s reach{_OTHER_KERNELS.get(gpu, '')}",
        memory_bytes=sheet.memory_gib * 2**30,
        hbm_gb_per_s=hbm * H200X8.hbm_gb_per_s,
        copy_gb_per_s=hbm * H200X8.copy_gb_per_s,
        matmul_tflops=products * H200X8.matmul_tflops,
        attention_tflops=products * H200X8.attention_tflops,
        nvlink_gb_per_s=sheet.nvlink_gb_per_s,
        **changes,
    )


def _sized(name: str, machine: Machine, num_gpus: int) -> Machine:
    """Return a machine with a number of GPUs, up to 8 in a host."""
    network = f"{machine.network_gb_per_s:g} GB/s a GPU, of an adapter of 400 Gbit/s each"
    hosts = f"; two hosts of {_PER_NODE}, whose network is assumed: {network}" if num_gpus > _PER_NODE else ""
    return replace(
        machine,
        name=f"{name}x{num_gpus}",
        source=machine.source + hosts,
        num_gpus=num_gpus,
        gpus_per_node=min(num_gpus, _PER_NODE),
    )


_KINDS = {"h100": _of_sheet("h100", _SHEETS["h100"]), "h200": H200X8, "b200": _of_sheet("b200", _SHEETS["b200"])}
PRESETS = {
    machine.name: machine for name, kind in _KINDS.items() for machine in (_sized(name, kind, n) for n in _NUM_GPUS)
}
