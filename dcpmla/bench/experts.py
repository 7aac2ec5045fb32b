"""Measure the experts of a layer and their router on one device: ours, torch's grouped products and, over block fp8,
other libraries' (--peers), over weights in each format.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dcpmla.bench.ceilings import measure_ceilings
from dcpmla.bench.options import directory_of, named
from dcpmla.bench.peers import load_adapters
from dcpmla.bench.results import Row, finite, leave_out
from dcpmla.bench.runner import Benchmark, Kept, Work
from dcpmla.bench.timing import calls_over, num_rotated
from dcpmla.bench.weights import WEIGHT_BYTES, random_weight
from dcpmla.bench.words import name_of
from dcpmla.comm.terms import whole
from dcpmla.job.bootstrap import Ranks
from dcpmla.job.join import Job
from dcpmla.model.experts import ExpertWeights, compute_experts
from dcpmla.model.router import Router, route, router_logits
from dcpmla.parallel.formats import AnyWeight, dequantize

PeerExperts = Callable[[Tensor, Tensor, Tensor], Tensor]  # takes x, expert_ids, expert_weights, as `compute_experts`

_MOST_SETS = 16
_CHECKED_TOKENS = 4  # compared with float64
_IN_FP8 = ("fp8", "w4afp8")  # products of many rows
# Of those, the format of activations makes almost all.
_LARGEST_ERROR = defaultdict(lambda: 0.01, dict.fromkeys(_IN_FP8, 0.08))


class Shape(NamedTuple):
    """The experts of a layer on one rank."""

    hidden_size: int
    width: int
    num_experts: int
    top_k: int
    num_shared: int


SHAPES = {
    "v3-tp4-64": Shape(7168, 512, 64, 8, 1),
    "v3-tp4": Shape(7168, 512, 256, 8, 1),
    "v2-lite": Shape(2048, 1408, 64, 6, 2),
    "v4-flash": Shape(4096, 2048, 256, 6, 0),
    "k2-tp8": Shape(7168, 256, 384, 8, 0),
}
_FORMATS = {  # useful formats; other shapes have bf16 and fp8
    **{"v4-flash": ("fp8", "fp4"), "k2-tp8": ("int4",)},
    "v3-tp4": ("bf16", "fp8", "int4_128", "w4afp8", "awq", "nvfp4"),
}
_SHAPES, _WEIGHTS = ",".join(SHAPES), ",".join(WEIGHT_BYTES)


class ExpertsCase(NamedTuple):
    """Tokens of a step through the experts of a layer."""

    geometry: str
    weights: str
    tokens: int


class ExpertsInputs:
    """Random tokens, and so many sets of random routes that the weights of one have left the L2 when it comes again."""

    def __init__(self, case: ExpertsCase, weights: ExpertWeights, dtype: torch.dtype, device: torch.device) -> None:
        shape = SHAPES[case.geometry]
        self.shape, self.weights = shape, weights
        self.x = torch.randn(case.tokens, shape.hidden_size, dtype=dtype, device=device)
        self.gate = torch.randn(1, shape.num_experts, shape.hidden_size, dtype=dtype, device=device)
        self.router_config = Router(scoring="sigmoid", top_k=shape.top_k, renormalize=True, num_shared=shape.num_shared)
        logits = torch.randn(_MOST_SETS, case.tokens, shape.num_experts, device=device)
        routes = [route(rows, None, self.router_config) for rows in logits]
        num_values = 3 * shape.hidden_size * shape.width
        num_hit = sum(len(ids.unique()) for ids, _ in routes) / len(routes)
        self.bytes_read = int(num_hit * num_values * WEIGHT_BYTES[case.weights])
        self.flops = 2 * num_values * routes[0][0].numel()
        self.routes = routes[: calls_over(num_rotated(self.bytes_read, device), device)]

    def ours(self, index: int) -> Tensor:
        return whole(compute_experts(self.x, *self.routes[index % len(self.routes)], self.weights))

    def router(self, _: int) -> object:
        return route(router_logits(self.x, self.gate), None, self.router_config)

    def grouped_mm(self, index: int) -> Tensor:
        """Run torch's grouped products over the routes in the order of their experts."""
        ids, expert_weights = self.routes[index % len(self.routes)]
        gate_up, down = self.weights
        assert isinstance(gate_up, Tensor)
        assert isinstance(down, Tensor)
        sorted_ids, order = ids.flatten().sort()
        ends = torch.searchsorted(sorted_ids, torch.arange(len(down), device=ids.device), right=True, out_int32=True)
        rows = functional.grouped_mm(self.x[order // ids.shape[1]], gate_up.transpose(1, 2), offs=ends)
        gate, up = rows.chunk(2, -1)
        rows = functional.grouped_mm(functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
        rows = torch.empty_like(rows).index_copy_(0, order, rows).unflatten(0, ids.shape)
        return (rows * expert_weights[..., None]).sum(1).to(self.x.dtype)

    def error(self, out: Tensor, index: int) -> Row:
        """Return the relative error (norms) of some tokens' rows against float64."""
        ids, expert_weights = (part[:_CHECKED_TOKENS] for part in self.routes[index % len(self.routes)])
        answer = torch.zeros(len(ids), self.shape.hidden_size, dtype=torch.float64, device=out.device)
        for token, row in enumerate(ids.tolist()):
            for i, expert in enumerate(row):
                gate_up, down = (dequantize(_one(weight, expert), torch.float32).double() for weight in self.weights)
                gate, up = (gate_up @ self.x[token].double()).chunk(2)
                answer[token] += expert_weights[token, i] * (down @ (functional.silu(gate) * up))
        return {"error": finite(float((out[: len(ids)] - answer).norm() / answer.norm()))}


class Experts(Benchmark[ExpertsCase, ExpertsInputs]):
    """Every kernel that takes a case, on the same inputs."""

    ranks_of = "one"
    options = {
        "shape": named([*SHAPES], "a shape", _SHAPES) | {"default": _SHAPES},
        "weights": named([*WEIGHT_BYTES], "a format", _WEIGHTS) | {"default": _WEIGHTS},
        "tokens": "1,8,32,128,512,8192",
        "peers": directory_of("deep_gemm.tar.xz, humming.tar.xz and vllm_moe.tar.xz, others' kernels for fp8"),
    }
    series = ("kernel", "weights")
    sample_seconds = 0.5

    @staticmethod
    def check(args: argparse.Namespace, ranks: Ranks) -> None:
        if args.peers is not None and not args.peers.is_dir():
            raise ValueError(f"--peers is {args.peers}, which is not a directory; give the one with their archives")

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        super().__init__(args, job)
        self.ceilings = measure_ceilings(self.device, self.dtype)
        self.peers: dict[str, Callable[[ExpertWeights], PeerExperts]] = {}
        if args.peers is not None:
            self.peers = load_adapters("experts").load_peers(args.peers)
        self.kept_peers = {name: Kept() for name in self.peers}

    def cases(self) -> Iterator[ExpertsCase]:
        """Yield cases, grouped by their weights."""
        for geometry in self.args.shape:
            formats = _FORMATS.get(geometry, ("bf16", "fp8"))
            for weights in (weights for weights in self.args.weights if weights in formats):
                yield from (ExpertsCase(geometry, weights, tokens) for tokens in self.args.tokens)

    def inputs(self, case: ExpertsCase) -> ExpertsInputs:
        make = partial(_random_experts, case.weights, SHAPES[case.geometry], self.dtype, self.device)
        return ExpertsInputs(case, self.kept.get((case.geometry, case.weights), make), self.dtype, self.device)

    def measure(self, case: ExpertsCase, inputs: ExpertsInputs) -> list[Row]:
        """Return a row for each kernel that takes the case."""
        kernels = {"dcpmla": inputs.ours}
        if case.weights == "bf16" and self.device.type == "cuda":
            kernels["grouped_mm"] = inputs.grouped_mm
        if case.weights == "fp8":
            kernels |= {name: partial(self._run_peer, name, case, inputs) for name in self.peers}
        num_sets, rows = len(inputs.routes), list[Row]()
        fields = inputs.shape._asdict() | {"router_us": round(self.time(inputs.router, num_sets).median_us, 2)}
        fields |= {"bytes_read": inputs.bytes_read}
        counted = inputs.flops, inputs.bytes_read
        work = Work(num_sets, inputs.error, *counted, in_fp8=case.weights in _IN_FP8, fields=fields)
        for name, kernel in kernels.items():
            # torch's products take GPUs and widths of their own.
            with nullcontext() if name == "dcpmla" else leave_out(f"{name} of {name_of(case)}"):
                rows.append(self.kernel_row(case._asdict(), name, kernel, work))
        return rows

    def _run_peer(self, name: str, case: ExpertsCase, inputs: ExpertsInputs, index: int) -> Tensor:
        """Run a peer, made before its first call over these weights."""
        make = partial(self.peers[name], inputs.weights)
        experts = self.kept_peers[name].get((case.geometry, case.weights), make)
        return experts(inputs.x, *(part.contiguous() for part in inputs.routes[index % len(inputs.routes)]))

    @staticmethod
    def limits(row: Row) -> dict[str, float]:
        return {"error": _LARGEST_ERROR[row["weights"]]}


def _random_experts(kind: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> ExpertWeights:
    num_experts, hidden, width = shape.num_experts + shape.num_shared, shape.hidden_size, shape.width

    def random(num_rows: int, num_cols: int) -> AnyWeight:
        return random_weight(kind, (num_experts, num_rows, num_cols), dtype, device)

    return ExpertWeights(random(2 * width, hidden), random(hidden, width))


def _one(weight: AnyWeight, expert: int) -> AnyWeight:
    return weight[expert] if isinstance(weight, Tensor) else weight.map(lambda part: part[expert])
