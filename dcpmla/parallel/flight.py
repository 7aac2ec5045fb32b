"""torch's flight recorder: the last collectives of this rank, on disk."""

import os
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d


def write_flight_record(rank: int) -> None:
    """Write what torch remembers, for its tool `torchfrtrace`, where NCCL would write it at a timeout of its own; without room, do not."""
    recorder: Any = _distributed_c10d
    dump = getattr(recorder, "_dump_nccl_trace", recorder._dump_fr_trace)  # NCCL's, or gloo's
    path = _start_of_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.name}{rank}").write_bytes(dump())
    except (OSError, RuntimeError):
        pass


def _start_of_path() -> Path:
    """Where torch's own writer puts them, rank to be added: its variable, the older name of it, or its cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME", f"{os.environ.get('HOME', '/tmp')}/.cache")
    default = f"{cache}/torch/comm_lib_trace_rank_"
    return Path(os.environ.get("TORCH_FR_DUMP_TEMP_FILE", os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", default)))
