"""What a layer pays for its exchange, per backend and number of tokens: `torchrun --standalone --nproc-per-node W benchmarks/exchange.py`.

Each time is of one operation inside a CUDA graph of 16, on inputs that rotate, the median over replays, the slowest rank's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from dcpmla.comm.select import select_exchange  # noqa: E402
from dcpmla.parallel.bootstrap import distributed, read_launcher  # noqa: E402

NUM_HEADS, QUERY_DIM, LATENT_DIM = 128, 576, 512  # DeepSeek-V3, all heads of the group
NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
OPERATIONS_PER_GRAPH, NUM_REPLAYS = 16, 30


def time_in_graph(operation: Callable[[int], object]) -> float:
    """Microseconds of one call of operation(index), index counting up within the graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for index in range(3):
            operation(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(OPERATIONS_PER_GRAPH):
            operation(index)
    times = []
    for _ in range(NUM_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / OPERATIONS_PER_GRAPH)
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def measure(num_tokens: int) -> list[dict[str, Any]]:
    size = dist.get_world_size()
    new = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(OPERATIONS_PER_GRAPH, num_tokens, NUM_HEADS // size, QUERY_DIM, **new)  # type: ignore[arg-type]
    out = torch.randn(OPERATIONS_PER_GRAPH, num_tokens, NUM_HEADS, LATENT_DIM, **new)  # type: ignore[arg-type]
    lse = torch.randn(OPERATIONS_PER_GRAPH, num_tokens, NUM_HEADS, device="cuda")
    rows = []
    for name in ("ag_rs", "a2a"):
        exchange = select_exchange(name, dist.group.WORLD).exchange  # type: ignore[arg-type]
        operations = {
            "gather_heads": lambda index, exchange=exchange: exchange.gather_heads(q[index]),
            "combine": lambda index, exchange=exchange: exchange.combine(out[index], lse[index]),
        }
        rows += [
            {"backend": name, "operation": operation, "num_tokens": num_tokens, "median_us": round(time_in_graph(call), 1)}
            for operation, call in operations.items()
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default=None, help="recorded; default: git's HEAD")
    parser.add_argument("--output", type=Path, default=None, help="default: benchmarks/results/h200xN/exchange.json")
    args = parser.parse_args()
    ranks = read_launcher("cuda")
    with distributed(ranks, timedelta(minutes=5)):
        rows = [row for num_tokens in NUM_TOKENS for row in measure(num_tokens)]
        if ranks.is_first:
            for row in rows:
                print(row)
            write(args, ranks.num_ranks, rows)


def write(args: argparse.Namespace, num_ranks: int, rows: list[dict[str, Any]]) -> None:
    output = args.output or ROOT / "benchmarks" / "results" / f"h200x{num_ranks}" / "exchange.json"
    commit = args.commit or subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    versions = {
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "nvls": os.environ.get("NCCL_NVLS_ENABLE"),
    }
    os.makedirs(output.parent, exist_ok=True)
    result = {"commit": commit, "machine": f"{num_ranks} x {torch.cuda.get_device_name()}", "versions": versions, "rows": rows}
    output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
