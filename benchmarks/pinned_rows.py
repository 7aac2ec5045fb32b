"""Measure kernels that gather single rows of latents from pinned host memory, beside a plain copy of as many bytes.

Usage: `torchrun --nproc-per-node 2 benchmarks/pinned_rows.py --json OUT.json`

Each rank fetches the rows that some tokens select (`cache/hot.py: fetch_hot_rows`) in a CUDA graph of several fetches,
at the same time as the others: rows that are all in host memory, then rows that are all on the GPU.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
from dcpmla.bench.results import Row, add_commit_argument, write_results  # noqa: E402
from dcpmla.cache.host_rows import host_bytes, host_tensor  # noqa: E402
from dcpmla.cache.hot import fetch_hot_rows  # noqa: E402
from dcpmla.cache.hot_set import HotSet, HotSizes  # noqa: E402

# Formats of a cache with the columns and the dtype of a row: 656 and 1,152 bytes.
FORMATS = {"fp8_ds_mla": (656, torch.uint8), "bf16": (576, torch.bfloat16)}
TOPK, BLOCK, NUM_CALLS, REPEATS = 2048, 64, 8, 5


def time_us(run: Callable[[], object]) -> float:
    """Return the median over repeats of the slowest rank's microseconds for a call, of NUM_CALLS that run makes."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        milliseconds = torch.tensor(start.elapsed_time(end), device="cuda")
        dist.all_reduce(milliseconds, op=dist.ReduceOp.MAX)
        times.append(float(milliseconds) * 1e3 / NUM_CALLS)
    return sorted(times)[REPEATS // 2]


def captured(hot: HotSet, latents: Tensor, selections: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """Return the replay of a graph that fetches the rows of NUM_CALLS selections, in turn."""

    def fetch() -> None:
        for call in range(NUM_CALLS):
            fetch_hot_rows(hot, latents, *selections[call % len(selections)])

    fetch()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fetch()
    return graph.replay


def measure(name: str, num_tokens: int, num_selected: int, num_slots: int) -> list[Row]:
    """Return the rows of one format: of num_tokens tokens, of which each selects num_selected rows on a rank."""
    (width, dtype), device = FORMATS[name], torch.device("cuda", torch.cuda.current_device())
    num_rows = num_tokens * num_selected
    sizes = HotSizes(1, num_rows, num_selected, width, dtype)
    (hot,) = HotSet.of(
        sizes, [torch.zeros(shape, dtype=kind, device=device) for shape, kind in sizes.tensors(num_slots)]
    )
    latents = host_tensor((num_slots // BLOCK, BLOCK, width), dtype, device)
    order = torch.randperm(num_slots, device=device).int()
    # Disjoint selections evict each other's rows, since one of them fills the set.
    numbers = torch.full((num_tokens,), num_selected, dtype=torch.int32, device=device)
    selections = [
        (order[start : start + num_rows].view(num_tokens, num_selected), numbers)
        for start in range(0, NUM_CALLS * num_rows, num_rows)
    ]
    num_bytes = num_rows * width * dtype.itemsize
    source, target = host_bytes(num_bytes, is_pinned=True), torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        for _ in range(NUM_CALLS):
            target.copy_(source, non_blocking=True)

    case = {"kv_cache_dtype": name, "tokens": num_tokens, "num_selected": num_selected, "row_width": width}
    times = {
        "rows in host memory": time_us(captured(hot, latents, selections)),
        "rows on the GPU": time_us(captured(hot, latents, selections[:1])),
        "plain copy": time_us(copy),
    }
    return [
        {
            "call": call,
            "dcp": dist.get_world_size(),
            **case,
            "median_us": round(each, 2),
            **({} if call == "rows on the GPU" else {"gb_per_s": round(num_bytes / each / 1e3, 3)}),
        }
        for call, each in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=1 << 22, metavar="N", help="rows in each rank's host memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the rows")
    add_commit_argument(parser)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rows = [
        row
        for name in FORMATS
        for num_tokens, num_selected in ((1, 256), (1, TOPK), (8, 256), (32, 256), (8, TOPK), (32, TOPK))
        for row in measure(name, num_tokens, num_selected, args.slots)
    ]
    if dist.get_rank() == 0:
        for row in rows:
            print(row)
        if args.json is not None:
            device = torch.device("cuda", torch.cuda.current_device())
            write_results(args.json, rows, dist.get_world_size(), device, args.commit)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
