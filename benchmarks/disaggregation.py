"""Compare a prefill server and a decode server, each on one GPU or more, with one server on all these GPUs that does
both: the rate of transfers, times to first tokens, and times between tokens of decodes while prompts arrive.

Usage: `python benchmarks/disaggregation.py --json OUT.json`, on two GPUs of one host

The model has published layer sizes, few layers and random weights. All servers are processes of their own, and get
requests over HTTP.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
from benchmarks.http_load import Answer, describe_lost, drive  # noqa: E402
from benchmarks.load import Load, request_rate, summarize  # noqa: E402
from benchmarks.offloading import block_sizes, model_config, random_prompts, write_config  # noqa: E402
from benchmarks.server_processes import API_KEY, ServerProcess, post, read_metric, running  # noqa: E402
from dcpmla.bench.results import Row, add_commit_argument, write_results  # noqa: E402
from dcpmla.cli.options import positive, positive_list  # noqa: E402

SETUPS = {"split": "prefill and decode", "both": "both"}
BYTES, SECONDS = "dcpmla_kv_transfer_bytes_total", "dcpmla_kv_transfer_seconds_total"
NUM_NEW = 16  # tokens of the answer to a prompt that arrives while others decode
CONNECT_SECONDS = 60.0
NUM_COPIES = 5  # timed copies; the fastest one counts


class Prompts:
    """Prompts of random tokens, all different, so that no server has cached one."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._streams = vocab_size, itertools.count()

    def __call__(self, num_prompts: int, length: int) -> list[list[int]]:
        """Return so many new prompts."""
        return random_prompts(num_prompts, length, self._vocab_size, next(self._streams))


def ask(url: str, load: Load) -> list[Answer]:
    """Send a load and return its answers.

    Raises:
        RuntimeError: A request is lost.
    """
    answers = drive(url, load, API_KEY, {"return_token_ids": True})
    if lost := describe_lost(answers):
        raise RuntimeError(f"{url}: {lost}")
    return answers


def warm_up(url: str, prompts: Prompts, length: int, has_transfers: bool) -> None:
    """Serve prompts until nothing is compiled any more, and until the servers have connected.

    Raises:
        RuntimeError: No transfer has come in time.
    """
    until = time.monotonic() + CONNECT_SECONDS
    for number in itertools.count(1):
        ask(url, Load([0.0, 0.0], prompts(2, length), [4, 4]))
        if number > 1 and not (has_transfers and read_metric(url, BYTES) == 0):
            return
        if time.monotonic() > until:
            raise RuntimeError(f"{url}: no transfer in {CONNECT_SECONDS:g} s; is the prefill server connected?")
        time.sleep(0.1)


def copy_row(args: argparse.Namespace, num_bytes: int) -> Row:
    """Return the rate of a plain copy of so many bytes to the other GPU; on CPUs, in memory."""
    is_cuda = args.device != "cpu" and torch.cuda.is_available()
    source = torch.ones(num_bytes, dtype=torch.uint8, device="cuda:0" if is_cuda else "cpu")
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:1" if is_cuda else "cpu")
    times = []
    for _ in range(NUM_COPIES + 1):  # the first one does not count
        synchronize(is_cuda)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(is_cuda)
        times.append(time.perf_counter() - started)
    return transfer_fields("copy", num_bytes, min(times[1:]))


def synchronize(is_cuda: bool) -> None:
    """Wait for both GPUs."""
    for index in range(2 if is_cuda else 0):
        torch.cuda.synchronize(index)


def transfer_row(prefill_url: str, url: str, prompts: Prompts, length: int, repeats: int) -> Row:
    """Return the rate of transfers of prompts that are prefilled before their blocks are read, and means of a prompt.

    The requests take the way of a router: so the seconds of a transfer do not contain the prefill.

    Raises:
        RuntimeError: No transfer has been counted.
    """
    before = [read_metric(url, name) for name in (BYTES, SECONDS)]
    for prompt in prompts(repeats, length):
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True}
        first = post(prefill_url, {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}})
        post(url, {**body, "max_tokens": 2, "kv_transfer_params": first["kv_transfer_params"]})
    num_bytes, seconds = (read_metric(url, name) - old for name, old in zip((BYTES, SECONDS), before, strict=True))
    if not num_bytes or not seconds:
        raise RuntimeError(f"{url}: {repeats} prompts were read, but {BYTES} counts {num_bytes:g} bytes")
    return {"tokens": length, **transfer_fields("transfer", int(num_bytes) // repeats, seconds / repeats)}


def transfer_fields(operation: str, num_bytes: int, seconds: float) -> Row:
    """Return the fields of a row on bytes that move."""
    rate = round(num_bytes / seconds / 1e9, 3)
    return {"operation": operation, "bytes_read": num_bytes, "seconds": round(seconds, 6), "gb_per_s": rate}


def first_token_row(url: str, prompts: Prompts, length: int, repeats: int) -> Row:
    """Return the times to the first token of prompts that come one after the other."""
    answers = [ask(url, Load([0.0], prompts(1, length), [4]))[0] for _ in range(repeats)]
    return {"input_len": length, **first_token_fields(answers)}


def first_token_fields(answers: Sequence[Answer]) -> Row:
    """Return mean and percentiles of the times to first tokens."""
    times = [answer.first_token_time - answer.arrival_time for answer in answers if answer.first_token_time is not None]
    return {f"time_to_first_token_{name}": value for name, value in summarize(times).items()}


def decodes_row(args: argparse.Namespace, url: str, prompts: Prompts) -> Row:
    """Return the times between tokens of requests that decode while prompts arrive at a fixed rate."""
    num_prompts = max(1, round(args.seconds * args.request_rate))
    arrivals = [args.delay + index / args.request_rate for index in range(num_prompts)]
    load = Load(
        arrival_times=[0.0] * args.decodes + arrivals,
        prompts=[*prompts(args.decodes, args.decode_context), *prompts(num_prompts, args.input_len)],
        output_lens=[args.decode_len] * args.decodes + [NUM_NEW] * num_prompts,
    )
    answers = ask(url, load)
    decodes, arrived = answers[: args.decodes], answers[args.decodes :]
    firsts = [answer.first_token_time or 0.0 for answer in answers]
    start = max(args.delay, *firsts[: args.decodes])
    end = min(max(firsts[args.decodes :]), *(answer.finish_time for answer in decodes))
    gaps = [gap for answer in decodes for gap in gaps_between(answer.token_times, start, end)]
    num_answered = sum(start <= first <= end for first in firsts[args.decodes :])
    return {
        **{name: getattr(args, name) for name in ("decodes", "input_len", "request_rate")},
        "context": args.decode_context,
        "output_len": args.decode_len,
        "seconds": round(end - start, 3),
        "requests_per_second": round(num_answered / (end - start), 3) if end > start else None,
        **{f"inter_token_{name}": value for name, value in summarize(gaps).items()},
        "inter_token_max": round(max(gaps, default=0.0), 6),
        **first_token_fields(arrived),
    }


def gaps_between(times: Sequence[float], start: float, end: float) -> list[float]:
    """Return the differences of successive times that end within [start, end]."""
    return [float(gap) for gap, time in zip(np.diff(times), times[1:], strict=True) if start <= time <= end]


def servers_of(args: argparse.Namespace, setup: str, model: Path, num_bytes: int) -> list[ServerProcess]:
    """Return the servers of a set-up; the last one serves clients."""
    options = ["--model", model, "--load-format", "dummy", "--device", args.device]
    options += ["--kv-cache-memory-bytes", num_bytes, "--max-num-batched-tokens", args.max_num_batched_tokens]
    num_prefill, num_gpus = args.prefill_tp, args.prefill_tp + args.decode_tp
    if setup == "both":
        return [ServerProcess(range(num_gpus), [*options, "-tp", num_gpus, "-dcp", num_gpus])]
    layouts = [["-tp", num, "-dcp", num] for num in (num_prefill, args.decode_tp)]
    prefill = ServerProcess(range(num_prefill), [*options, *layouts[0], "--role", "prefill"])
    decode = [*options, *layouts[1], "--role", "decode", "--prefill-servers", prefill.url]
    return [prefill, ServerProcess(range(num_prefill, num_gpus), decode)]


def measure(args: argparse.Namespace, setup: str, urls: Sequence[str], prompts: Prompts) -> Iterator[Row]:
    """Yield the rows of a set-up whose servers run."""
    url, is_split = urls[-1], setup == "split"
    warm_up(url, prompts, min(*args.context, args.max_num_batched_tokens), is_split)
    if is_split:
        for length in args.context:
            row = transfer_row(urls[0], url, prompts, length, args.repeats)
            yield row
            yield {"tokens": length, **copy_row(args, row["bytes_read"])}
    for length in args.context:
        yield first_token_row(url, prompts, length, args.repeats)
    yield decodes_row(args, url, prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--geometry", choices=("deepseek-v3", "tiny"), default="deepseek-v3", help="published sizes; tiny: for CPUs")
    add("--layers", type=positive, default=6, metavar="L", help="layers of the model; the first one is dense")
    add("--experts", type=positive, default=64, metavar="E", help="routed experts of a layer")
    add("--device", default="auto", help="cuda, cpu, or auto")
    add("--prefill-tp", type=positive, default=1, metavar="N", help="ranks of the prefill server, which share a cache")
    add("--decode-tp", type=positive, default=1, metavar="N", help="ranks of the decode server, which share a cache")
    add("--setup", nargs="+", choices=SETUPS, default=list(SETUPS), help="servers to measure")
    add("--context", type=positive_list, default=[32768, 131072], metavar="S,...", help="tokens of prompts, alone")
    add("--repeats", type=positive, default=3, metavar="N", help="prompts of each length")
    add("--decodes", type=positive, default=16, metavar="N", help="requests that decode")
    add("--decode-context", type=positive, default=8192, metavar="S", help="tokens of their prompts")
    add("--decode-len", type=positive, default=16384, metavar="N", help="new tokens of each; they should last")
    add("--input-len", type=positive, default=32768, metavar="N", help="tokens of prompts that arrive meanwhile")
    add("--request-rate", type=request_rate, default=1.0, metavar="R", help="these prompts in a second")
    add("--seconds", type=float, default=20.0, help="time in which they arrive")
    add("--delay", type=float, default=10.0, metavar="SECONDS", help="time from the decodes to the first prompt")
    add("--max-num-batched-tokens", type=positive, default=8192, metavar="N", help="limit of a step's tokens")
    add("--json", type=Path, metavar="OUT.json", help="result file to write")
    add_commit_argument(parser)
    args = parser.parse_args()
    args.tensor_parallel_size = args.decode_context_parallel_size = 1
    longest = max(*args.context, args.input_len, args.decode_context + args.decode_len) + NUM_NEW
    config = model_config(args, longest)
    block = block_sizes(args, config)
    # Decodes at their full lengths, and prompts: one computed, one sent, two that wait.
    num_tokens = args.decodes * (args.decode_context + args.decode_len) + 4 * longest
    num_bytes = (-(-num_tokens // block.block_tokens) + args.decodes + 8) * block.bytes_per_block
    names = ("geometry", "max_num_batched_tokens")
    fields = {**{name: getattr(args, name) for name in names}, "num_layers": args.layers, "num_experts": args.experts}
    fields["variant"] = f"{args.prefill_tp} + {args.decode_tp}"
    rows = list[Row]()
    for setup in args.setup:
        servers = servers_of(args, setup, write_config(config), num_bytes)
        with running(servers):
            for row in measure(args, setup, [server.url for server in servers], Prompts(config.vocab_size)):
                rows.append({**fields, "servers": SETUPS[setup], **row})
                print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
                if args.json is not None:
                    args.json.parent.mkdir(parents=True, exist_ok=True)
                    is_cuda = args.device != "cpu" and torch.cuda.is_available()
                    num_ranks = args.prefill_tp + args.decode_tp
                    write_results(args.json, rows, num_ranks, torch.device("cuda:0" if is_cuda else "cpu"), args.commit)


if __name__ == "__main__":
    main()
