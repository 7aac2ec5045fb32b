"""What a layer pays for its exchange, per backend and number of tokens: `torchrun --standalone --nproc-per-node W benchmarks/exchange.py`.

Each time is of one operation inside a CUDA graph of 16, on inputs that rotate, the median over replays, the slowest rank's.
"""

import argparse
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from dcpmla.cli.bench_layers import exchange_timings  # noqa: E402
from dcpmla.cli.results import add_commit_argument, write_results  # noqa: E402
from dcpmla.config import MLAConfig  # noqa: E402
from dcpmla.parallel.bootstrap import distributed, read_launcher  # noqa: E402

NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_commit_argument(parser)
    parser.add_argument("--output", type=Path, default=None, help="default: benchmarks/results/h200xN/exchange.json")
    args = parser.parse_args()
    config = MLAConfig.from_hf(transformers.DeepseekV3Config())  # all 128 heads, over the group
    ranks = read_launcher("cuda")
    rows = []
    with distributed(ranks, timedelta(minutes=5)):
        for num_tokens in NUM_TOKENS:
            for row, timing in exchange_timings(config, dist.group.WORLD, num_tokens, ranks.device, torch.bfloat16):  # type: ignore[arg-type]
                rows.append({**row, "median_us": round(timing.median_us, 1)})
                if ranks.is_first:
                    print(rows[-1], flush=True)
        if ranks.is_first:
            output = args.output or ROOT / "benchmarks" / "results" / f"h200x{ranks.num_ranks}" / "exchange.json"
            output.parent.mkdir(parents=True, exist_ok=True)
            write_results(output, rows, ranks.num_ranks, ranks.device, args.commit)


if __name__ == "__main__":
    main()
