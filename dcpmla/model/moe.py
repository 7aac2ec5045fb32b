"""Mixtures of experts: gates, and routed and shared experts as one partial sum over the TP group.

Experts are cut like an MLP's columns, or with expert parallelism spread whole over the ranks. Either way every rank
sees all tokens, routes them identically, and returns a share of a sum over the ranks.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from dcpmla.comm.terms import Partial, whole
from dcpmla.model.experts import ExpertWeights, compute_experts
from dcpmla.model.glu import Glu
from dcpmla.model.latent import Latent
from dcpmla.model.mlp import MLP, MLPPart
from dcpmla.model.router import Router, route, router_logits, weigh
from dcpmla.parallel.by_rows import by_rows
from dcpmla.parallel.formats import (
    BLOCK,
    FP4,
    AnyWeight,
    Format,
    Quantized,
    dequantize,
    format_of,
    is_block_fp8,
    is_packed,
)
from dcpmla.parallel.linear import Weight, fill
from dcpmla.parallel.quantized import PlainRows, plain, unpack
from dcpmla.parallel.reformat import to_block_fp8

_READERS = 4  # threads of a rank: while one copies to the GPU, others read


class Gate(nn.Module):
    """The choice of each token's experts, and their weights by a linear layer's scores.

    Args:
        weight: [S, E, hidden], terms of it (`split_weight`).
        router: Rule of the experts' choice and weights.
        bias: float32 [E], added to the scores for the choice alone; None for none.
        table: int64 [vocab, top_k], experts of each token by its id (DeepSeek-V4's first layers); None to choose by
            scores.
    Attributes:
        is_deterministic: Whether a token's choice depends on no other token.
    """

    is_deterministic = False

    def __init__(self, weight: Tensor, router: Router, bias: Tensor | None = None, table: Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.router = nn.Parameter(weight, requires_grad=False), router
        self.bias, self.table = bias, table

    def forward(self, x: Tensor, token_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return expert ids [T, k] int32 and weights [T, k] float32 for x [T, hidden] of tokens [T]."""
        logits = router_logits(x, self.weight, self.is_deterministic)
        if self.table is None and self.is_deterministic:
            ids, weights = by_rows(functools.partial(route, bias=self.bias, router=self.router), logits)
            return ids, weights
        if self.table is None:
            return route(logits, self.bias, self.router)
        assert token_ids is not None
        return weigh(logits, self.table[token_ids], self.router)


class MoE(nn.Module):
    """This rank's part of a layer's experts.

    Args:
        gate: gate(x [T, hidden], token_ids) -> expert ids [T, k] int32, weights [T, k] float32.
        experts: Experts, or slices of experts, of this rank; the first has the id first_expert.
        shared: MLP that all tokens go through; None if it is among the experts.
        num_experts: Number of experts of all ranks.
        latent: Narrower rows that experts work on; None if they take x.
        adds_identity: Whether this rank adds the experts with higher ids, which are the identity (LongCat's zero
            experts).
    Attributes:
        is_deterministic: Whether a token's output depends on no other token.
    """

    is_deterministic = False

    def __init__(
        self,
        gate: Gate,
        experts: ExpertWeights,
        first_expert: int,
        shared: MLP | None,
        glu: Glu,
        num_experts: int,
        adds_identity: bool,
        latent: Latent | None = None,
    ) -> None:
        super().__init__()
        self.gate, self.experts, self.first_expert, self.shared = gate, experts, first_expert, shared
        self.glu, self.num_experts, self.adds_identity, self.latent = glu, num_experts, adds_identity, latent

    @property
    def takes_quantized(self) -> bool:
        """True if quantized rows save work."""
        of_routed = self.experts.takes_quantized if self.latent is None else self.latent.down.takes_quantized
        return of_routed or (self.shared is not None and self.shared.takes_quantized)

    def forward(self, x: PlainRows, token_ids: Tensor | None = None) -> Partial:
        """Return this rank's share [T, hidden] of the layer's output for x [T, hidden], to be summed over the ranks.

        Args:
            token_ids: [T] int64, for gates that read them.
        """
        expert_ids, expert_weights = self.gate(plain(x), token_ids)
        own_ids = expert_ids - self.first_expert if self.first_expert else expert_ids
        rows = x if self.latent is None else self.latent.down(x)
        options = self.glu, self.num_experts, self.is_deterministic
        out = compute_experts(rows, own_ids, expert_weights, self.experts, *options)
        if self.latent is not None:
            out = self.latent.leave(out)
        if self.shared is not None:
            out = whole(out) + self.shared(x)
        if self.adds_identity:
            weights = expert_weights.masked_fill(expert_ids < self.num_experts, 0)
            share = sum(weights.unbind(1)) if self.is_deterministic else weights.sum(-1)  # in one order, or any
            out = whole(out)
            out = out + plain(x) * share[:, None].to(out.dtype)
        return out


def read_expert(
    weights: Mapping[str, Weight], part: MLPPart, hidden_size: int, dtype: torch.dtype
) -> tuple[AnyWeight, ...]:
    """Return gate, up and down, quantized where they are stored so and their blocks can be stacked; else in dtype."""
    matrices = part.read(weights, hidden_size)
    if all(is_packed(matrix) or _has_whole_blocks(matrix) for matrix in matrices):
        return matrices
    return tuple(dequantize(matrix, dtype) for matrix in matrices)


def load_experts(
    weights: Mapping[str, Weight],
    parts: Sequence[MLPPart],
    hidden_size: int,
    expert_dtype: str,
    dtype: torch.dtype,
    device: torch.device,
) -> ExpertWeights:
    """Read experts as they are stored, several at a time.

    Args:
        parts: Experts of this rank, in the order of their ids.
        expert_dtype: "auto", or "fp8" for the same values of experts in e2m1: twice the memory, and faster products.
        dtype: Dtype of weights that are not kept quantized.
    Raises:
        ValueError: A weight is missing or has another shape, or experts are stored in several formats; with "fp8", they
            are not in e2m1, or fp8 blocks cannot hold their values.
    """
    gate_up, down = (_Stack(len(parts), device) for _ in range(2))
    is_inference = torch.is_inference_mode_enabled()  # a thread's own state

    def read(index: int, part: MLPPart) -> None:
        with torch.inference_mode(is_inference):
            matrices = read_expert(weights, part, hidden_size, dtype)
            if expert_dtype == "fp8":
                matrices = tuple(_as_fp8(matrix, part.prefix, device) for matrix in matrices)
            gate_up.put(index, *matrices[:2])
            down.put(index, matrices[2])

    read(0, parts[0])  # it shows the sizes
    with ThreadPoolExecutor(_READERS) as threads:
        for done in [threads.submit(read, index, part) for index, part in enumerate(parts) if index]:
            done.result()
    return ExpertWeights(gate_up.finish(), down.finish())


def _as_fp8(matrix: AnyWeight, prefix: str, device: torch.device) -> Quantized:
    encoded = None
    if isinstance(matrix, Quantized) and matrix.format == FP4:
        encoded = to_block_fp8(matrix.map(lambda part: part.to(device)))
    if encoded is None or not _has_whole_blocks(encoded):
        raise ValueError(
            f"expert_dtype (--expert-dtype) is 'fp8', but the experts {prefix}* are not in e2m1, or not of values "
            f"that blocks in fp8 have; choose auto"
        )
    return encoded


def _has_whole_blocks(part: AnyWeight) -> bool:
    return is_block_fp8(part) and all(size % BLOCK == 0 for size in unpack(part)[0].shape)


class _Stack:
    """Matrices of one kind in a device's memory, one after the other."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._format: Format | None = None
        self._tensors: list[Tensor | None] = []  # one; the fields of quantized matrices

    def put(self, index: int, *parts: AnyWeight) -> None:
        """Fill a matrix with parts stacked by rows."""
        if not self._tensors:
            self._format = format_of(parts[0])
            self._tensors = [self._new(rows) for rows in _components(parts)]
        if any(format_of(part) != self._format for part in parts):
            raise ValueError(
                f"checkpoint: experts of one layer must be stored alike; some are {self._format or 'plain'}, others "
                f"are {', '.join(sorted({str(format_of(part) or 'plain') for part in parts}))}"
            )
        for stack, rows in zip(self._tensors, _components(parts), strict=True):
            if stack is not None:
                fill(stack[index], *(part for part in rows if part is not None))

    def _new(self, rows: tuple[Tensor | None, ...]) -> Tensor | None:
        if (first := rows[0]) is None:
            return None
        shape = self._count, sum(len(part) for part in rows if part is not None), *first.shape[1:]
        return torch.empty(shape, dtype=first.dtype, device=self._device)

    def finish(self) -> AnyWeight:
        first = self._tensors[0]
        assert first is not None
        return first if self._format is None else Quantized(*self._tensors)  # type: ignore[arg-type]


def _components(parts: Sequence[AnyWeight]) -> Iterator[tuple[Tensor | None, ...]]:
    """Yield the parts' tensors, field by field."""
    return zip(*((part,) if isinstance(part, Tensor) else part for part in parts), strict=True)


def unstack_experts(weights: Mapping[str, Weight], prefix: str, num_experts: int) -> Mapping[str, Weight]:
    """Return weights with an entry per expert of a layer, also if a checkpoint stacks them in one tensor (as
    transformers saves Mistral-4's).

    Args:
        prefix: Prefix of the experts' names.
    """
    if f"{prefix}down_proj" not in weights:
        return weights
    gate_up, down = weights[f"{prefix}gate_up_proj"], weights[f"{prefix}down_proj"]
    size = down.shape[-1]
    single = {}
    for number in range(num_experts):
        single[f"{prefix}{number}.gate_proj.weight"] = _Matrix(gate_up, number, slice(0, size))
        single[f"{prefix}{number}.up_proj.weight"] = _Matrix(gate_up, number, slice(size, 2 * size))
        single[f"{prefix}{number}.down_proj.weight"] = _Matrix(down, number, slice(0, down.shape[1]))
    return {**weights, **single}


class _Matrix:
    """Rows of one matrix of a stack [E, N, K]."""

    def __init__(self, stack: Weight, number: int, rows: slice) -> None:
        self._stack, self._number, self._rows = stack, number, rows

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self._rows.stop - self._rows.start, self._stack.shape[2]))

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        rows, cols = (*index, slice(None))[:2] if isinstance(index, tuple) else (index, slice(None))
        start, stop, _ = rows.indices(self.shape[0])
        rows = slice(self._rows.start + start, self._rows.start + stop)
        return self._stack[self._number : self._number + 1, rows, cols][0]
