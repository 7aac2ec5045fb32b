"""Attention inside vLLM's engine, a layer's decode and its prefill, by this package and by vLLM's own.

`python benchmarks/in_vllm.py --num-gpus 2`, where vLLM is installed. Each variant is an engine of its own over
DeepSeek-V3's dense layers with random weights, under torchrun, with as many cached tokens as the load says. Two things
are timed: vLLM's step, of decodes as the CUDA graph that it replayed last, of a prefill from the request to its token;
and nothing but attention, with vLLM's own layers, caches and metadata of that step: of decodes from the layers' queries
to their merged rows, of a prefill from queries to outputs. A prefill takes the route that the backend chooses for it:
the context is gathered and projected, or queries are absorbed and attend as decodes do. Engines start together and take
turns: clocks and power change more from minute to minute than kernels differ.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.vllm_engine import Recorder, measure, start_engine  # noqa: E402
from dcpmla.bench.results import add_commit_argument, installed, write_results  # noqa: E402

NUM_ROUNDS = 2  # in which each engine measures once; the last one counts
LONGEST_WAIT = timedelta(minutes=15)  # of an engine for the others
# Backends of vLLM's --attention-backend, and of its --dcp-comm-backend where ranks share a cache.
WHOLE = [("CUSTOM", None), ("FLASH_ATTN_MLA", None), ("FLASHMLA", None), ("TRITON_MLA", None)]
SHARED = [("CUSTOM", None), ("FLASH_ATTN_MLA", "ag_rs"), ("FLASH_ATTN_MLA", "a2a")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-gpus", type=int, required=True, help="ranks of a job: -tp and -dcp")
    add_commit_argument(parser)
    parser.add_argument("--output", type=Path, default=None, help="default: benchmarks/results/h200[xN]/vllm.json")
    args = parser.parse_args()
    rows = launch(1, WHOLE)
    if args.num_gpus > 1:
        rows += launch(args.num_gpus, SHARED)
    save(rows, args.num_gpus, args.commit, args.output)


def launch(num_ranks: int, variants: Sequence[tuple[str, str | None]]) -> list[dict[str, Any]]:
    """Return the rows of variants, each measured by a job of its own, all of which run at the same time."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    jobs = []
    for index, (backend, exchange) in enumerate(variants):
        arguments = [__file__, backend, exchange or "none", str(store.port), str(index), str(len(variants))]
        jobs.append(subprocess.Popen(command + arguments, env=environment, stdout=subprocess.PIPE, text=True))
    rows = []
    with ThreadPoolExecutor(len(jobs)) as pool:
        try:
            for ended in as_completed([pool.submit(_await, job) for job in jobs]):
                rows += ended.result()
        except BaseException:
            for job in jobs:
                job.terminate()  # torchrun ends its ranks
            raise
    return rows


def _await(job: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Return what a job has measured; raise CalledProcessError where it has failed."""
    output, _ = job.communicate()
    if job.returncode:
        raise subprocess.CalledProcessError(job.returncode, job.args)
    return json.loads(output.splitlines()[-1])


def take_turns(store: dist.Store, index: int, num_jobs: int) -> Iterator[None]:
    """Yield NUM_ROUNDS times, while no other job measures. Collective over the job."""
    dist.barrier()
    if dist.get_rank() == 0 and store.add("started", 1) == num_jobs:
        store.set("0", "")
    for turn in range(index, NUM_ROUNDS * num_jobs, num_jobs):
        store.wait([str(turn)], LONGEST_WAIT)
        yield
        dist.barrier()
        store.set(str(turn + 1), "")


def save(rows: list[dict[str, Any]], num_gpus: int, commit: str | None, output: Path | None) -> None:
    """Write rows with how much faster this package is: its rows' `speedup_over_*`."""
    keys = ("dcp", "operation", "batch", "context", "tokens")
    for ours in (row for row in rows if row["kernel"] == "dcpmla"):
        for row in rows:
            if row is not ours and all(row.get(key) == ours.get(key) for key in keys):
                name = row["kernel"] if row["dcp"] == 1 else f"{row['kernel']}_{row['exchange']}"
                ours[f"speedup_over_{name.lower()}"] = row["median_us"] / ours["median_us"]
    machine = f"h200x{num_gpus}" if num_gpus > 1 else "h200"
    output = output or ROOT / "benchmarks" / "results" / machine / "vllm.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    write_results(output, rows, num_gpus, torch.device("cuda"), commit, {"vllm": installed("vllm")})


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        main()
    else:
        record = Recorder()
        running = start_engine(int(os.environ["WORLD_SIZE"]), *sys.argv[1:3])  # it ends the process group with itself
        port, *which = map(int, sys.argv[3:])
        for _ in take_turns(dist.TCPStore("127.0.0.1", port, is_master=False), *which):
            found = measure(running, record)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
        dist.barrier()
        os._exit(0)  # vLLM's threads wait for requests
