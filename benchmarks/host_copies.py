"""Measure copies of cached blocks between GPUs and host memory, beside one plain copy of as many pinned bytes.

Usage: `torchrun --nproc-per-node 2 benchmarks/host_copies.py --json OUT.json`

Each rank copies the blocks of a context of DeepSeek-V3's 61 layers in bfloat16, sharded over all ranks, at the same
time as the others. Slots of host memory follow each other, or are scattered, as after many evictions.
"""

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
from dcpmla.bench.results import Row, add_commit_argument, write_results  # noqa: E402
from dcpmla.cache.copies import Copy  # noqa: E402
from dcpmla.cache.host import HostMemory  # noqa: E402
from dcpmla.cache.host_rows import host_bytes  # noqa: E402
from dcpmla.cache.latent import LatentCache, LatentPlan, LayerMemory  # noqa: E402

LAYERS, WIDTH, BLOCK = 61, 576, 64
REPEATS = 3


def measure(name: str, num_bytes: int, run: Callable[[], Copy]) -> Row:
    """Return the row of a copy: the median over repeats of the slowest rank's time."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        dist.barrier()
        copy = run()
        copy.queue()
        torch.cuda.synchronize()
        seconds = torch.tensor(copy.seconds, device="cuda")
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        times.append(float(seconds))
    median = sorted(times)[REPEATS // 2]
    return {"call": name, "dcp": dist.get_world_size(), "seconds": median, "gb_per_s": num_bytes / median / 1e9}


def plain(source: torch.Tensor, target: torch.Tensor) -> Copy:
    """Copy all bytes at once, on a stream of its own."""

    def part() -> Iterator[None]:
        target.copy_(source, non_blocking=True)
        yield None

    return Copy(part(), torch.cuda.Stream())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=131072, metavar="S", help="tokens, over all ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the rows")
    add_commit_argument(parser)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    device = torch.device("cuda", torch.cuda.current_device())
    num_blocks = args.context // BLOCK // dist.get_world_size()
    layers = (LayerMemory(WIDTH),) * LAYERS
    plan = LatentPlan(num_blocks=num_blocks, block_size=BLOCK, layers=layers, dtype=torch.bfloat16, dcp_size=1)
    cache, blocks = LatentCache(plan, device), list(range(num_blocks))
    memory = HostMemory(cache)
    memory.allocate(2 * num_blocks, 0)
    random.Random(0).shuffle(blocks)
    num_bytes = num_blocks * plan.bytes_per_block
    on_device, on_host = torch.empty(num_bytes, dtype=torch.uint8, device=device), host_bytes(num_bytes, is_pinned=True)
    is_deterministic, scattered = list(range(num_blocks)), random.Random(1).sample(range(2 * num_blocks), num_blocks)
    rows = [
        measure("plain load", num_bytes, lambda: plain(on_host, on_device)),
        measure("plain store", num_bytes, lambda: plain(on_device, on_host)),
        measure("store", num_bytes, lambda: memory.store(blocks, is_deterministic)),
        measure("load", num_bytes, lambda: memory.load(blocks, is_deterministic)),
        measure("store, scattered slots", num_bytes, lambda: memory.store(blocks, scattered)),
        measure("load, scattered slots", num_bytes, lambda: memory.load(blocks, scattered)),
    ]
    if dist.get_rank() == 0:
        for row in rows:
            print(row)
        if args.json is not None:
            write_results(args.json, rows, dist.get_world_size(), device, args.commit)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
