"""Measure transfers between a prefill rank and a decode rank without engines, and reads of staging slots alone, under
settings of UCX: rate, time and CPU time of a part. Print how UCX moves the bytes.

Usage: `python benchmarks/transfer_link.py --json OUT.json`, on two GPUs of one host, or one for both processes

Each setting has two new processes, with the latents of a few layers of DeepSeek-V3's sizes.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
from dcpmla.bench.geometries import config_of  # noqa: E402
from dcpmla.bench.results import Row, add_commit_argument, left_out, write_results  # noqa: E402
from dcpmla.cache.layers import Cache  # noqa: E402
from dcpmla.cli.options import positive, positive_list  # noqa: E402
from dcpmla.config import DCPConfig  # noqa: E402
from dcpmla.integrations.families.table import attention_of  # noqa: E402
from dcpmla.transfer.incoming import Incoming  # noqa: E402
from dcpmla.transfer.layout import CacheLayout, describe  # noqa: E402
from dcpmla.transfer.outgoing import Outgoing  # noqa: E402
from dcpmla.transfer.parts import RowMover  # noqa: E402
from dcpmla.transfer.route import Route  # noqa: E402
from dcpmla.transfer.staging import MOST_SLOTS, NUM_SLOTS, TAGS_BYTES, allocate_staging  # noqa: E402
from dcpmla.transfer.transport import Peer, rank_name  # noqa: E402

BOTH_VISIBLE = "both GPUs visible"  # instead of variables: to both processes
# The first one is what servers have. With "auto" UCX refuses reads by CUDA IPC where it finds no NVLink; the last one
# has none.
SETTINGS = {
    "cuda": (
        "",
        BOTH_VISIBLE,
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=auto",
        "UCX_TLS=cuda_ipc,cuda_copy,sm,self",
        "UCX_TLS=cuda_copy,tcp,self",
    ),
    "cpu": ("", "UCX_TLS=tcp,self"),
}
ENGINES = "prefill", "decode"
WAIT_SECONDS = 60.0


class Case(NamedTuple):
    """What two processes measure.

    Attributes:
        operation: "transfer", or "read": slots alone.
        variant: Variables of the environment with spaces between them, or BOTH_VISIBLE.
    """

    operation: str
    variant: str
    device: str
    num_layers: int
    tokens: int
    slot_bytes: int
    repeats: int


class Moved(NamedTuple):
    """One measurement in one process: its time, the process's CPU time, bytes, and parts or slots."""

    seconds: float
    cpu_seconds: float
    num_bytes: int
    num_parts: int


class Rank:
    """One of the two processes, with the only rank of its engine."""

    def __init__(self, case: Case, is_source: bool) -> None:
        from dcpmla.transfer.nixl import NixlTransport  # UCX reads the variables when it is loaded

        self.case, self.is_source = case, is_source
        device = torch.device(case.device)
        if device.type == "cuda":
            device = torch.device("cuda", 0 if is_source else torch.cuda.device_count() - 1)
            torch.cuda.set_device(device)
        engine = ENGINES[not is_source]
        self.transport = NixlTransport(rank_name(engine, 0), allocate_staging(device, NUM_SLOTS, case.slot_bytes))
        self.cache, self.layout = new_cache(case, device)
        self.peer = Peer(engine, self.layout, [self.transport.metadata()])
        self.other = rank_name(ENGINES[is_source], 0)
        self.side: Outgoing | Incoming | None = None
        if case.operation == "transfer":
            kind = Outgoing if is_source else Incoming
            self.side = kind(self.transport, RowMover(self.cache, self.layout), self.layout, 0)

    def connect(self, peer: Peer) -> None:
        """Connect to the other process."""
        if self.side is None:
            self.transport.connect(self.other, peer.agents[0])
        else:
            self.side.connect(peer)

    def move(self, number: int) -> Moved:
        """Move all bytes once.

        Raises:
            RuntimeError: The transfer has failed, or does not end.
        """
        started, cpu_started = time.perf_counter(), time.process_time()
        seconds, num_bytes, num_parts = self._read_slots() if self.side is None else self._transfer(number)
        return Moved(seconds or time.perf_counter() - started, time.process_time() - cpu_started, num_bytes, num_parts)

    def close(self) -> None:
        """End the connection."""
        (self.side or self.transport).close()

    def _transfer(self, number: int) -> tuple[float, int, int]:
        """Send or receive a prompt that is computed; return its seconds, bytes and parts."""
        blocks, tokens, name = range(self.cache.sizes.num_blocks), self.case.tokens, f"handoff {number}"
        if isinstance(self.side, Outgoing):
            handoff = self.side.begin(name)
            handoff.computed(blocks, tokens)
            handoff.finish(tokens, 0)
        else:
            assert self.side is not None
            handoff = self.side.open(ENGINES[0], name, 0, tokens, blocks, 0)
        until = time.monotonic() + WAIT_SECONDS
        while not handoff.is_done and time.monotonic() < until:
            time.sleep(2e-3)
        if not handoff.is_done or handoff.has_failed:
            raise RuntimeError(f"the transfer fails: {handoff.reason or 'it does not end'}")
        parts = Route(self.layout, 0, self.layout, 0).parts(0, tokens, self.case.slot_bytes - TAGS_BYTES)
        return handoff.seconds, handoff.num_bytes, len(parts)

    def _read_slots(self) -> tuple[float, int, int]:
        """Read as many slots as hold the prompt, or wait for the other process's reads; return seconds (0: not known),
        bytes and slots.
        """
        num_slots = -(-sum(spec.row_bytes for spec in self.layout.tokens) * self.case.tokens // self.case.slot_bytes)
        num_bytes, reads, num_begun = num_slots * self.case.slot_bytes, list[Any](), 0
        started = time.perf_counter()
        while self.is_source and not any(message == b"end" for _, message in self.transport.receive()):
            if time.perf_counter() - started > WAIT_SECONDS:
                raise RuntimeError("the reads do not end")
        while not self.is_source and (reads or num_begun < num_slots):
            if len(reads) < MOST_SLOTS and num_begun < num_slots:
                slot = num_begun % NUM_SLOTS
                reads.append(self.transport.read(self.other, slot, slot, self.case.slot_bytes, b""))
                num_begun += 1
            if any(read.is_done and read.has_failed for read in reads):
                raise RuntimeError("a read fails")
            reads = [read for read in reads if not read.is_done]
        seconds = time.perf_counter() - started
        if not self.is_source:
            self.transport.send(self.other, b"end")
        return seconds, num_bytes, num_slots


def new_cache(case: Case, device: torch.device) -> tuple[Cache, CacheLayout]:
    """Return a rank's cache with room for the prompt, filled, and its layout."""
    config = config_of("deepseek-v3", num_hidden_layers=case.num_layers, first_k_dense_replace=1, dtype="bfloat16")
    dcp = DCPConfig(tensor_parallel_size=1, decode_context_parallel_size=1)
    cache = attention_of(config).plan_cache(dcp, [case.tokens], torch.bfloat16, num_states=1).allocate(device)
    for tensor in cache.tensors:
        tensor.view(torch.uint8).fill_(1)
    return cache, describe(cache, dcp)


def run_rank(pipe: Connection, case: Case, is_source: bool, log: str) -> None:
    """Run one of the two processes."""
    variables = {} if case.variant == BOTH_VISIBLE else dict(each.split("=", 1) for each in case.variant.split())
    os.environ |= {"UCX_LOG_FILE": log, "UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y", **variables}
    if case.device == "cuda" and case.variant != BOTH_VISIBLE:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0 if is_source else -1]
    try:
        rank = Rank(case, is_source)
        pipe.send(rank.peer)
        rank.connect(pipe.recv())
        while (number := pipe.recv()) is not None:
            pipe.send(rank.move(number))
        rank.close()
    except Exception as error:  # the other process does not wait for this one
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def receive(pipe: Connection) -> Any:
    """Return what a process sends.

    Raises:
        RuntimeError: It has failed, or is silent.
    """
    if not pipe.poll(2 * WAIT_SECONDS):
        raise RuntimeError("a process is silent")
    if isinstance(answer := pipe.recv(), Exception):
        raise answer
    return answer


def measure(case: Case) -> tuple[Row, list[str]]:
    """Return a row, and the lines in which UCX says how it moves the bytes.

    Raises:
        RuntimeError: A process has failed.
    """
    context, pipes, processes = get_context("spawn"), list[Connection](), list[Any]()
    with tempfile.TemporaryDirectory() as directory:
        logs = [Path(directory) / engine for engine in ENGINES]
        for is_source, log in zip((True, False), logs, strict=True):
            pipe, there = context.Pipe()
            processes.append(context.Process(target=run_rank, args=(there, case, is_source, str(log)), daemon=True))
            processes[-1].start()
            pipes.append(pipe)
        try:
            peers = [receive(pipe) for pipe in pipes]
            for pipe, peer in zip(pipes, reversed(peers), strict=True):
                pipe.send(peer)
            samples = []
            for number in range(case.repeats + 1):
                for pipe in pipes:
                    pipe.send(number)
                samples.append([receive(pipe) for pipe in pipes])
            for pipe in pipes:
                pipe.send(None)
                processes[pipes.index(pipe)].join(10)
        finally:
            for process in processes:
                process.kill()
        lines = [line for log in logs if log.exists() for line in log.read_text().splitlines()]
    del samples[0]  # it connects the two
    _, moved = samples[0]
    seconds = median(target.seconds for _, target in samples)
    cpu_seconds = median(source.cpu_seconds + target.cpu_seconds for source, target in samples)
    return {
        **{name: getattr(case, name) for name in ("operation", "variant", "num_layers", "tokens", "slot_bytes")},
        "bytes_read": moved.num_bytes,
        "seconds": round(seconds, 6),
        "gb_per_s": round(moved.num_bytes / seconds / 1e9, 3),
        "part_us": round(1e6 * seconds / moved.num_parts, 1),
        "part_cpu_us": round(1e6 * cpu_seconds / moved.num_parts, 1),
    }, protocol_lines(lines)


def protocol_lines(lines: list[str]) -> list[str]:
    """Return the tables of reads in a log of UCX: what is read, ranges of sizes, how, and over which devices; the whole
    log if it has none.
    """
    kept, is_read = list[str](), False
    for line in (line.rpartition("]")[2].strip() for line in lines):
        if "remote memory" in line or "active message" in line:
            is_read = "remote memory read" in line
        if is_read and line.startswith("|") and line not in kept:
            kept.append(line)
    return kept or lines


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield all cases."""
    for variant in args.variant or SETTINGS[args.device]:
        for slot_kib in args.slot_kib:
            for operation in ("read", "transfer"):
                sizes = args.layers, args.tokens, slot_kib << 10, args.repeats
                yield Case(operation, variant, args.device, *sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=SETTINGS, default="cuda", help="device of both processes; cuda: a GPU for each")
    add("--layers", type=positive, default=6, metavar="L", help="layers of DeepSeek-V3")
    add("--tokens", type=positive, default=32768, metavar="S", help="tokens of a prompt")
    add("--slot-kib", type=positive_list, default=[1 << 14, 1 << 17], metavar="N,...", help="KiB of a staging slot")
    add("--variant", nargs="+", metavar="SETTING", help="variables of UCX, NAME=VALUE with spaces between them")
    add("--repeats", type=positive, default=7, metavar="N", help="transfers; their median counts")
    add("--json", type=Path, metavar="OUT.json", help="result file to write")
    add_commit_argument(parser)
    args = parser.parse_args()
    rows = list[Row]()
    for case in cases(args):
        try:
            row, lines = measure(case)
        except RuntimeError as error:
            print(left_out(str(case), error), flush=True)
            continue
        rows.append(row)
        print("\n".join([", ".join(f"{name} {value}" for name, value in row.items()), *lines]), flush=True)
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            device = torch.device("cuda:0") if args.device == "cuda" else torch.device("cpu")
            num_devices = min(len(ENGINES), torch.cuda.device_count()) if args.device == "cuda" else len(ENGINES)
            write_results(args.json, rows, num_devices, device, args.commit)


if __name__ == "__main__":
    main()
