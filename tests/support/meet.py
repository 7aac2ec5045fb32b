"""A job that only meets: each rank prints what it found as a line of JSON.

Arguments: seconds to wait, then attributes of torch to set (NAME=VALUE). With the variable FAILS, the first ranks that
torchrun starts fail once they have met.
"""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from dcpmla.job.bootstrap import distributed, read_launcher

VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT")


def main(seconds: str, *attributes: str) -> None:
    for attribute in attributes:
        setattr(torch, *attribute.split("="))
    ranks = read_launcher("cpu")
    with distributed(ranks, timedelta(seconds=float(seconds))) as store:
        total = torch.tensor([10.0**ranks.rank])
        dist.all_reduce(total)
        # The store is shared: each rank reads what the next one wrote.
        store.set(f"rank {ranks.rank}", str(ranks.rank))
        environment = {name: os.environ.get(name) for name in VARIABLES}
        neighbour = int(store.get(f"rank {(ranks.rank + 1) % ranks.num_ranks}"))
    if "FAILS" in os.environ and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(1)
    found = {
        "rank": ranks.rank,
        "local_rank": ranks.local_rank,
        "num_local_ranks": ranks.num_local_ranks,
        "origin": ranks.origin,
        "sum": total.item(),
        "neighbour": neighbour,
    }
    line = json.dumps({**found, "environment": environment})
    os.write(1, f"{line}\n".encode())  # in one write, since all ranks share the launcher's pipe


if __name__ == "__main__":
    main(*sys.argv[1:])
