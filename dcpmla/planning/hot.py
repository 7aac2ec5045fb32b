"""Contexts whose latents are in host memory, and the time of steps over the share of selected rows that are fetched."""

import math
from dataclasses import dataclass
from statistics import NormalDist

from dcpmla.fields import option_label
from dcpmla.planning.deployment import Deployment
from dcpmla.planning.machine import Machine

MISS_RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
# Measured on an H200: what a layer takes more than over a cache on the GPU if all rows are hot, and the rate at which
# kernels gather single rows, as a share of that of long copies.
_HOT_US, _GATHERED_SHARE = 35.0, 0.75


@dataclass(frozen=True, kw_only=True)
class HotMemory:
    """The contents of a DCP group's memory.

    Attributes:
        gpu_bytes_per_token: Bytes of a token of context on the GPU of its owner: index keys, and where its latents are.
        host_bytes_per_token: Bytes of its latents in host memory.
        hot_bytes_per_rank: Bytes of hot and scratch rows on each GPU.
        gpu_tokens, host_tokens: Tokens of context for which the GPUs, and the hosts, have room; the smaller counts.
    """

    gpu_bytes_per_token: int
    host_bytes_per_token: int
    hot_bytes_per_rank: int
    gpu_tokens: int
    host_tokens: int


@dataclass(frozen=True, kw_only=True)
class HotStep:
    """A decode step at one rate of misses.

    Attributes:
        miss_rate: Share of the selected rows that are not on the GPU.
        bytes_per_rank: Bytes that the slowest rank fetches, in all layers.
        fetch_us: Microseconds of the fetches.
        step_us: Microseconds of the step with them.
    """

    miss_rate: float
    bytes_per_rank: int
    fetch_us: float
    step_us: float


def check_tiers(kv_hot_tokens: int | None, kv_offloading_size: float | None, **disk: object) -> None:
    """Raise ValueError for latents in host memory without a size, or with files below.

    Args:
        disk: One option of files on disks, by its field's name; None for no files.
    """
    if kv_hot_tokens is None:
        return
    given = f"{option_label('kv_hot_tokens')} is {kv_hot_tokens}"
    if kv_offloading_size is None:
        size = option_label("kv_offloading_size")
        raise ValueError(f"{given}, so all latents are in host memory; give its size, {size}")
    for name, value in disk.items():
        if value is not None:
            raise ValueError(
                f"{given}: latents stay in host memory, and blocks reach no disk; leave {option_label(name)} out"
            )


def hot_memory(deployment: Deployment, gpu_tokens: int, host_gib: float) -> HotMemory:
    """Return what a DCP group holds.

    Args:
        gpu_tokens: Tokens for which the GPUs have room.
        host_gib: GiB of host memory of all ranks of the TP group.
    """
    block, dcp = deployment.block(), deployment.setting.dcp
    num_blocks = int(host_gib * 2**30) // deployment.setting.tp // block.host_bytes_per_block
    return HotMemory(
        gpu_bytes_per_token=block.bytes_per_token,
        host_bytes_per_token=block.host_bytes_per_block * dcp // block.block_tokens,
        hot_bytes_per_rank=block.bytes_fixed,
        gpu_tokens=gpu_tokens,
        host_tokens=num_blocks * block.block_tokens,
    )


def fetch_bytes(deployment: Deployment, batch: int, context: int, miss_rate: float) -> float:
    """Return the bytes that the slowest rank of a DCP group fetches in a step. Each layer waits for the rank with most
    misses, whose number is the expected largest of W normal ones.

    Args:
        batch: Requests of a TP group.
        context: Tokens of each.
        miss_rate: Share of the selected rows that are fetched.
    """
    setting, num_bytes = deployment.setting, 0.0
    deviations = NormalDist().inv_cdf((setting.dcp - 0.375) / (setting.dcp + 0.25))  # Blom's approximation
    for layer, number in deployment.model.attention.sorts.items():
        selected = batch * setting.query_len * layer.reads(context).num_rows * miss_rate
        mean = selected / setting.dcp
        num_missed = min(selected, mean + deviations * math.sqrt(mean))
        num_bytes += number * num_missed * layer.row_bytes(setting.kv_cache_dtype)
    return num_bytes


def gathered_gb_per_s(machine: Machine) -> float:
    """Return the rate at which a kernel gathers rows from pinned host memory."""
    return _GATHERED_SHARE * machine.host_gb_per_s


def hot_step(deployment: Deployment, batch: int, context: int, miss_rate: float) -> HotStep:
    """Return the time of a decode step whose fetches nothing hides (`fetch_bytes`)."""
    machine, num_layers = deployment.machine, deployment.model.attention.num_layers
    num_bytes = fetch_bytes(deployment, batch, context, miss_rate)
    fetch_us = num_layers * _HOT_US + num_bytes / gathered_gb_per_s(machine) / 1e3
    step_us = deployment.step_us(batch, context)["total"] + fetch_us
    return HotStep(miss_rate=miss_rate, bytes_per_rank=round(num_bytes), fetch_us=fetch_us, step_us=step_us)


def needed_hit_rate(deployment: Deployment, batch: int, context: int) -> float:
    """Return the share of selected rows that must be on the GPU so that fetches take no longer than the rest of a step;
    0 if they never do.
    """
    low, high = 0.0, 1.0
    rest_us = deployment.step_us(batch, context)["total"]
    if hot_step(deployment, batch, context, high).fetch_us <= rest_us:
        return 0.0
    for _ in range(30):
        middle = (low + high) / 2
        is_short = hot_step(deployment, batch, context, middle).fetch_us <= rest_us
        low, high = (middle, high) if is_short else (low, middle)
    return 1 - low
