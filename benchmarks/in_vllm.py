"""Attention inside vLLM's engine, a layer's decode and its prefill, by this package and by vLLM's own.

`python benchmarks/in_vllm.py --num-gpus 2`, where vLLM is installed. Each variant is an engine of its own over a
model's layers with random weights (`vllm_models.py`), under torchrun, with as many cached tokens as the load says. Two
things are timed: vLLM's step, of decodes as the CUDA graph that it replayed last, of a prefill from the request to its
token; and a layer's share of it, with vLLM's own layers, caches and metadata of that step. Of dense layers that is
nothing but attention, from queries to outputs; of sparse and compressed ones the whole module of attention, projections
included. A prefill takes the route that the backend chooses for it. Engines start together and take turns: clocks and
power change more from minute to minute than kernels differ.
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
from benchmarks.vllm_models import MODELS, Variant  # noqa: E402
from dcpmla.bench.results import add_commit_argument, installed, write_results  # noqa: E402

NUM_ROUNDS = 2  # in which each engine measures once; the last one counts
LONGEST_WAIT = timedelta(minutes=15)  # An engine waits so long for the others.


def main() -> None:
    args = parse_arguments()
    rows = []
    for num_ranks in sorted({1, args.num_gpus}):
        if variants := MODELS[args.model].variants(num_ranks, args.backends):
            rows += launch(args.model, num_ranks, variants)
    save(rows, args.num_gpus, args.commit, args.output or output_of(args.model, args.num_gpus))


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line, this process's by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-gpus", type=int, required=True, help="ranks of a job: -tp and -dcp")
    parser.add_argument("--model", choices=MODELS, default="deepseek-v3", help="default: deepseek-v3")
    parser.add_argument("--backends", nargs="+", choices=backends(), help="only these, by vLLM's names; default: all")
    add_commit_argument(parser)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/h200[xN]/vllm[_MODEL].json")
    return parser.parse_args(words)


def backends() -> list[str]:
    """Return the names of all models' backends."""
    return sorted({variant.backend for model in MODELS.values() for variant in (*model.whole, *model.shared)})


def output_of(model: str, num_gpus: int) -> Path:
    """Return the file of results that a model and a number of GPUs have by default."""
    machine = f"h200x{num_gpus}" if num_gpus > 1 else "h200"
    name = "vllm" if model == "deepseek-v3" else f"vllm_{model}"
    return ROOT / "benchmarks" / "results" / machine / f"{name}.json"


def launch(model: str, num_ranks: int, variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return the rows of variants. Each runs as a job; all jobs run at the same time."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    jobs = []
    for index, variant in enumerate(variants):
        arguments = [__file__, model, json.dumps(variant), str(store.port), str(index), str(len(variants))]
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


def save(rows: list[dict[str, Any]], num_gpus: int, commit: str | None, output: Path) -> None:
    """Write rows, compared."""
    compare(rows)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_results(output, rows, num_gpus, torch.device("cuda"), commit, {"vllm": installed("vllm")})


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to this package's rows how much faster it is than others at the same load: `speedup_over_*`."""
    keys = ("tp", "operation", "batch", "context", "tokens", "layer_kind", "kv_cache_dtype")
    for ours in (row for row in rows if row["kernel"] == "dcpmla"):
        for row in rows:
            if row is not ours and all(row.get(key) == ours.get(key) for key in keys):
                ours[f"speedup_over_{_name(row, ours).lower()}"] = row["median_us"] / ours["median_us"]


def _name(row: dict[str, Any], ours: dict[str, Any]) -> str:
    """Return the name of another variant, with its exchange; "dcp1" if this package alone shares a cache."""
    if row["dcp"] > 1:
        return f"{row['kernel']}_{row['exchange']}"
    return row["kernel"] if ours["dcp"] == 1 else f"{row['kernel']}_dcp1"


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        main()
    else:
        record = Recorder()
        name, words, port, *which = sys.argv[1:]
        model, variant = MODELS[name], Variant(*json.loads(words))
        running = start_engine(model, variant, int(os.environ["WORLD_SIZE"]))  # it ends the process group with itself
        for _ in take_turns(dist.TCPStore("127.0.0.1", int(port), is_master=False), *map(int, which)):
            found = measure(running, record, model, variant)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
        dist.barrier()
        os._exit(0)  # vLLM's threads wait for requests
