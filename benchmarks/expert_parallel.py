"""Experts whole on each rank against experts cut by TP: `torchrun --standalone --nproc-per-node N
benchmarks/expert_parallel.py`.

DeepSeek-V3's layers (hidden 7168, 128 heads, experts of 2048) with 64 routed experts and random weights, one dense
and two with experts, in bfloat16; attention is TP x DCP with dcp = N both ways. A time is of one `ShardedModel.step`,
the median over steps,
the slowest rank's. Cut experts generate greedily; whole experts are fed the same tokens, and the share of steps in
which they choose
the same one is reported: random weights make near-ties, which bfloat16 decides either way.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from checkpoints import deepseek_v3, save_random  # noqa: E402

from dcpmla.attention.step import StepMetadata  # noqa: E402
from dcpmla.bench.results import add_commit_argument, write_results  # noqa: E402
from dcpmla.cache.latent import LatentCache, num_blocks  # noqa: E402
from dcpmla.comm.select import select_exchange  # noqa: E402
from dcpmla.config import DCPConfig  # noqa: E402
from dcpmla.integrations.transformers import ShardedModel, load_config, load_model  # noqa: E402
from dcpmla.job.bootstrap import Ranks, distributed, read_launcher  # noqa: E402
from dcpmla.parallel.mesh import DCPMesh, init_mesh  # noqa: E402

NUM_PREFILL_STEPS, NUM_DECODE_STEPS = 8, 32
TINY_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "q_lora_rank",
)
TINY_SIZES += ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def config(tiny: bool) -> Any:
    config = deepseek_v3(num_layers=3, num_experts=64)
    if tiny:
        for name in TINY_SIZES:
            setattr(config, name, max(8, getattr(config, name) // 64))
        config.num_key_value_heads, config.head_dim = config.num_attention_heads, config.qk_rope_head_dim
        config.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    return config


@contextmanager
def checkpoint(tiny: bool, ranks: Ranks) -> Iterator[Path]:
    """A directory that the first rank writes and removes; all ranks are on one host."""
    with tempfile.TemporaryDirectory() as directory:
        shared = [directory]
        if ranks.is_first:
            save_random(config(tiny), Path(directory))
        dist.broadcast_object_list(shared, src=0)
        yield Path(shared[0])
        dist.barrier()  # before the first rank removes it


class Load:
    """Requests of equal length on one model: prefills of a few of them, decodes of a batch of them."""

    def __init__(self, model: ShardedModel, dcp: DCPConfig, mesh: DCPMesh, prompts: Tensor) -> None:
        self.model, self.dcp, self.mesh, self.prompts = model, dcp, mesh, prompts
        num_requests, self.prompt_len = prompts.shape
        final_lens = [self.prompt_len + NUM_DECODE_STEPS] * num_requests
        self.cache = LatentCache(
            LatentCache.plan(model.attention_config, dcp, model.num_attention_layers, final_lens, model.dtype),
            model.device,
        )
        per_request = num_blocks(final_lens[0], dcp)
        self.tables = [list(range(number * per_request, (number + 1) * per_request)) for number in range(num_requests)]

    def prefill(self, requests: range) -> tuple[float, Tensor]:
        """Seconds and the first new token of each request."""
        return self._step(self.prompts[requests.start : requests.stop], self.prompt_len, requests)

    def decode(self, token_ids: Tensor, step: int) -> tuple[float, Tensor]:
        """Seconds and the next token of requests 0, 1, ..., given their token number `step` after the prompt."""
        return self._step(token_ids[:, None], self.prompt_len + step + 1, range(len(token_ids)))

    def _step(self, token_ids: Tensor, seq_len: int, requests: range) -> tuple[float, Tensor]:
        """Tokens [n, q] of n requests, whose lengths they make seq_len."""
        num_requests, query_len = token_ids.shape
        tables = [self.tables[request] for request in requests]
        metadata = StepMetadata.build(
            [query_len] * num_requests,
            [seq_len] * num_requests,
            tables,
            self.dcp,
            self.mesh.dcp_rank,
            self.model.device,
        )
        last_rows = torch.arange(1, num_requests + 1, device=self.model.device) * query_len - 1
        dist.barrier()
        _synchronize(self.model.device)
        started = time.perf_counter()
        tokens = self.model.step(token_ids.flatten(), metadata, self.cache, last_rows).argmax(-1)
        _synchronize(self.model.device)
        return time.perf_counter() - started, tokens


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    load: Load, batch_sizes: list[int], forced: dict[int, Tensor] | None
) -> tuple[list[dict[str, Any]], dict[int, Tensor]]:
    """Rows, and for each batch size the tokens chosen [1 + NUM_DECODE_STEPS, batch]; `forced` ones are fed instead of
    these.
    """
    rows, chosen = [], {}
    for size in (1, 4, len(load.prompts) // NUM_PREFILL_STEPS):
        steps = [load.prefill(range(step * size, (step + 1) * size)) for step in range(NUM_PREFILL_STEPS)]
        rows.append(
            {
                "phase": "prefill",
                "num_requests": size,
                **_speed([seconds for seconds, _ in steps], size * load.prompt_len, load.model.device),
            }
        )
    first_tokens = torch.cat([tokens for _, tokens in steps])  # the last size has prefilled all requests
    for size in batch_sizes:
        times, tokens = [], [first_tokens[:size]]
        for step in range(NUM_DECODE_STEPS):
            seconds, new = load.decode((tokens if forced is None else forced[size])[step], step)
            times.append(seconds)
            tokens.append(new)
        chosen[size] = torch.stack(tokens)
        rows.append({"phase": "decode", "num_requests": size, **_speed(times, size, load.model.device)})
    return rows, chosen


def _speed(times: list[float], num_tokens: int, device: torch.device) -> dict[str, float]:
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {
        "num_tokens": num_tokens,
        "step_ms": round(float(slowest) * 1e3, 3),
        "tokens_per_second": round(num_tokens / float(slowest), 1),
    }


def run(directory: Path, ranks: Ranks, prompts: Tensor, batch_sizes: list[int]) -> list[dict[str, Any]]:
    dcp = DCPConfig(tensor_parallel_size=ranks.num_ranks, decode_context_parallel_size=ranks.num_ranks)
    mesh = init_mesh(ranks.num_ranks, ranks.num_ranks)
    selection = select_exchange(dcp, mesh.dcp_group, ranks.device)
    rows: list[dict[str, Any]] = []
    reference: dict[int, Tensor] | None = None
    for experts in ("cut", "whole"):
        model = load_model(
            directory, load_config(directory), dcp, mesh, selection, None, ranks.device, experts == "whole"
        )
        measured, chosen = measure(Load(model, dcp, mesh, prompts), batch_sizes, reference)
        for row in measured:
            row = {"experts": experts, **row}
            if reference is not None and row["phase"] == "decode":
                size = row["num_requests"]
                row["tokens_as_cut"] = round(float((chosen[size] == reference[size]).float().mean()), 4)
            rows.append(row)
            if ranks.is_first:
                print(json.dumps(row), flush=True)
        reference = chosen
        del model
        gc.collect()  # the model refers to itself: its memory is wanted now, not at the collector's leisure
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    add_commit_argument(parser)
    parser.add_argument(
        "--output", type=Path, default=None, help="default: benchmarks/results/h200xN/expert_parallel.json; none on CPU"
    )
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    ranks = read_launcher(args.device)
    batch_sizes, prompt_len = ([1, 4, 16], 12) if args.tiny else ([1, 8, 32, 128], 512)
    with distributed(ranks, timedelta(minutes=5)):
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(1, 256, (128, prompt_len), generator=generator).to(ranks.device)
        with checkpoint(args.tiny, ranks) as directory:
            rows = run(directory, ranks, prompts, batch_sizes)
        on_gpu = ranks.device.type == "cuda"
        output = args.output or (
            ROOT / "benchmarks" / "results" / f"h200x{ranks.num_ranks}" / "expert_parallel.json" if on_gpu else None
        )
        if ranks.is_first and output is not None:
            write_results(output, rows, ranks.num_ranks, ranks.device, args.commit)


if __name__ == "__main__":
    main()
