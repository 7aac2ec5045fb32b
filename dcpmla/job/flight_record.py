"""torch's flight record of a rank: its last collectives, written to a file when the job ends with a fault."""

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from dcpmla.own_files import open_own


def write_flight_record(rank: int) -> None:
    """Write torch's record of the last operations where NCCL would after a timeout; `torchfrtrace` reads it.

    Nothing is written where the disk has no room, or where the path is a link, a pipe or another user's file.
    """
    recorder: Any = _distributed_c10d
    has_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    dump = recorder._dump_nccl_trace if has_nccl else recorder._dump_fr_trace  # each has its own operations only
    path = _start_of_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = dump()
        descriptor = open_own(path.with_name(f"{path.name}{rank}"), os.O_WRONLY | os.O_CREAT)
        with open(descriptor, "wb") as file:
            file.truncate()
            file.write(content)
    except (OSError, RuntimeError):
        pass


def _start_of_path() -> Path:
    """Return the path, up to the rank, as torch's own writer builds it from its variables or the cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME", f"{os.environ.get('HOME', '/tmp')}/.cache")
    default = f"{cache}/torch/comm_lib_trace_rank_"
    return Path(os.environ.get("TORCH_FR_DUMP_TEMP_FILE", os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", default)))
