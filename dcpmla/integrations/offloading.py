"""The memories below an engine's cache: host memory by --kv-offloading-size, files of blocks on local disks by
--kv-offloading-path and --kv-offloading-disk-size.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from torch.distributed import ProcessGroup

from dcpmla.cache.disk_file import RECORD_BYTES, BlockFile
from dcpmla.cache.disk_files import DiskFiles
from dcpmla.cache.disk_folder import DiskFolder
from dcpmla.cache.disk_transfer import DiskTransfers
from dcpmla.cache.host import HostMemory
from dcpmla.cache.layers import Cache
from dcpmla.cache.plan import CachePlan
from dcpmla.cache.tier import HostTier, Tier, count_slots
from dcpmla.config import DCPConfig
from dcpmla.integrations.engine_options import EngineOptions
from dcpmla.integrations.open_model import ModelFiles
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.integrations.weights_digest import weights_digest
from dcpmla.job.bootstrap import agree
from dcpmla.parallel.collectives import broadcast_value, gather_values
from dcpmla.parallel.mesh import DCPMesh

_GIB = 1 << 30
_PAIR = np.dtype([("key", "V32"), ("slot", "<i8")])

_logger = logging.getLogger(__name__)


def make_host_memory(
    cache: Cache, size: float | None, num_ranks: int, num_local_ranks: int
) -> tuple[HostMemory | None, HostTier]:
    """Allocate a rank's host memory; return it, or None without a size, and the bookkeeping of its content.

    Args:
        size: GiB of all ranks together; None for no host memory.
        num_ranks: Number of ranks.
        num_local_ranks: Number of ranks on this host.
    Raises:
        ValueError: The size holds no block, or the host has less memory.
    """
    if size is None or cache.sizes.host_bytes_per_block:  # whose latents never leave host memory
        return None, HostTier()
    memory, num_bytes = HostMemory(cache), host_bytes_of_rank(size, num_ranks, num_local_ranks)
    num_blocks, num_states = count_slots(num_bytes, memory.block_bytes, memory.state_bytes, cache.sizes.block_tokens)
    if not num_blocks:
        least = memory.block_bytes + memory.state_bytes
        raise ValueError(
            f"kv_offloading_size (--kv-offloading-size) is {size:g} GiB, {num_bytes:,} bytes for each of {num_ranks} "
            f"ranks; a block and a state take {least:,}"
        )
    memory.allocate(num_blocks, num_states)
    return memory, HostTier(num_blocks, num_states)


def host_bytes_of_rank(size: float, num_ranks: int, num_local_ranks: int) -> int:
    """Return a rank's bytes of host memory.

    Args:
        size, num_ranks, num_local_ranks: Arguments of `make_host_memory`.
    Raises:
        ValueError: The host has less memory.
    """
    num_bytes = int(size * _GIB) // num_ranks
    available = psutil.virtual_memory().available // num_local_ranks
    if num_bytes > available:
        raise ValueError(
            f"kv_offloading_size (--kv-offloading-size) is {size:g} GiB, {num_bytes:,} bytes for each of {num_ranks} "
            f"ranks; this host has {available:,} bytes free for each of its {num_local_ranks} ranks"
        )
    return num_bytes


def check_scales(dcp: DCPConfig, options: EngineOptions) -> None:
    """Raise ValueError if the scale of cached values is only known after the first prompt."""
    if options.kv_offloading_path is not None and dcp.calculate_kv_scales:
        raise ValueError(
            "kv_offloading_path (--kv-offloading-path) keeps blocks for later jobs, whose first prompts set other "
            "scales with calculate_kv_scales (--calculate-kv-scales); give kv_cache_scale (--kv-cache-scale) instead"
        )


def open_folder(options: EngineOptions, files: ModelFiles, plan: CachePlan, model: ShardedModel) -> DiskFolder | None:
    """Open the folder of a job's files; None without --kv-offloading-path. Collective over the job.

    Args:
        plan: Sizes of the cache.
    Raises:
        ValueError: The directory is not suitable.
    """
    if options.kv_offloading_path is None:
        return None
    identity = cache_identity(files, plan, model)
    with agree():
        folder = DiskFolder(Path(options.kv_offloading_path), identity)
    if model.placement.mesh.tp_rank == 0:
        _log_others(folder, options.kv_offloading_path, identity)
    return folder


def make_disk_tier(
    folder: DiskFolder | None, memory: HostMemory | None, options: EngineOptions, plan: CachePlan, mesh: DCPMesh
) -> Tier:
    """Open a rank's files below its host memory; return the bookkeeping of their content. Collective over the job.

    Args:
        folder: Result of `open_folder`; None for no files.
        memory: Host memory of this rank, which gets the files.
        plan: Sizes of the cache.
    Raises:
        ValueError: The disk or the size is not suitable.
    """
    if folder is None or options.kv_offloading_disk_size is None:
        return Tier()
    assert memory is not None
    num_bytes = int(options.kv_offloading_disk_size * _GIB) // mesh.tp_size
    with agree():
        opened = open_files(folder, mesh.tp_rank, memory, num_bytes, plan.block_tokens)
    memory.disk = DiskFiles(*map(DiskTransfers, opened))
    return share_content(opened, mesh.tp_group)


def cache_identity(files: ModelFiles, plan: CachePlan, model: ShardedModel) -> dict[str, str]:
    """Return names and values of everything that the bytes of blocks depend on besides tokens. Collective over the job.

    The digest of the weights covers all ranks.
    """
    dcp, group = model.placement.dcp, model.placement.mesh.tp_group
    digests = gather_values(weights_digest(*model.modules()).hex(), group, "comparing the weights")
    sizes = dcp.tensor_parallel_size, dcp.decode_context_parallel_size, dcp.cp_kv_cache_interleave_size
    return {
        **({"mode": "deterministic"} if dcp.deterministic else {}),
        "weights": sha256("".join(digests).encode()).hexdigest(),
        "files": sha256(json.dumps(files.digests, sort_keys=True).encode()).hexdigest(),
        "dtype": str(model.dtype),
        "layout": "tp {}, dcp {}, interleave {}, block size {}".format(*sizes, dcp.block_size),
        "cache": repr(replace(plan, num_blocks=1, num_states=min(1, plan.num_states))),
    }


def open_files(folder: DiskFolder, rank: int, memory: HostMemory, num_bytes: int, block_tokens: int) -> list[BlockFile]:
    """Open a rank's file of blocks, and a file of states if the cache has any, within so many bytes.

    Raises:
        ValueError: The bytes hold no block, or the disk has less room.
    """
    state_bytes = memory.state_bytes and memory.state_bytes + RECORD_BYTES
    counts = count_slots(num_bytes, memory.block_bytes + RECORD_BYTES, state_bytes, block_tokens)
    opened = [BlockFile(folder.claim(rank), counts[0], memory.block_bytes)]
    if memory.state_bytes:
        opened.append(BlockFile(folder.claim(rank, "states"), counts[1], memory.state_bytes))
    return opened


def share_content(opened: list[BlockFile], group: ProcessGroup | None) -> Tier:
    """Return what a rank's files hold on all ranks of a group. Collective over it.

    Args:
        group: Ranks that share the blocks; None for one rank.
    """
    tier = Tier(*(file.num_slots for file in opened))
    for name, table, file in zip(("blocks", "states"), (tier.blocks, tier.states), opened, strict=False):
        table.fill(_common(file.stored, group))
        if num_lost := len(file.stored) - len(table):
            _logger.info(
                "%s of %s %s on the disk are not used: other ranks lack them", num_lost, len(file.stored), name
            )
    return tier


def _common(stored: Mapping[bytes, int], group: ProcessGroup | None) -> dict[bytes, int]:
    """Return the slots by key that are the same on all ranks, in the order of the first one."""
    if group is None:
        return dict(stored)
    operation = "comparing the blocks on disks"
    pairs = np.array(list(stored.items()), dtype=_PAIR).tobytes().hex()
    first = np.frombuffer(bytes.fromhex(broadcast_value(pairs, group, operation)), dtype=_PAIR)
    known = [(key.tobytes(), int(slot)) for key, slot in zip(first["key"], first["slot"], strict=True)]
    has = np.packbits(np.array([stored.get(key) == slot for key, slot in known], dtype=bool)).tobytes().hex()
    masks: list[str] = gather_values(has, group, operation)
    everyone = np.bitwise_and.reduce([np.frombuffer(bytes.fromhex(mask), dtype=np.uint8) for mask in masks])
    are_common = np.unpackbits(everyone, count=len(known))
    return {key: slot for (key, slot), is_common in zip(known, are_common, strict=True) if is_common}


def _log_others(folder: DiskFolder, path: str, identity: Mapping[str, Any]) -> None:
    """Log once which blocks of the directory this job cannot use, and why."""
    if not folder.others:
        return
    named = {"layout", "dtype"}
    differences = sorted(
        {
            f"{name} {other.get(name)!r} instead of {value!r}" if name in named else f"other {name}"
            for other in folder.others
            for name, value in identity.items()
            if other.get(name) != value and not (name == "cache" and other.get("layout") != identity["layout"])
        }
    )
    _logger.warning(
        "kv_offloading_path (--kv-offloading-path) is %s, whose blocks this job cannot use: they have %s; files that "
        "no job uses are removed",
        path,
        ", ".join(differences),
    )
