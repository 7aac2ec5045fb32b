"""What `bench decode` gives every kernel: a case's sizes, its rotated inputs, the float64 answer, and the floor that the hardware sets."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcpmla.attention import reference
from dcpmla.attention.workspace import decode_workspace
from dcpmla.cli.timing import time_operation

LATENT_DIM, ROPE_DIM = 512, 64  # what every kernel here is built for
SCALE = (128 + ROPE_DIM) ** -0.5  # of the heads before absorption: 128 without positions, 64 with
_ROTATED_BYTES = {"cuda": 512 << 20, "cpu": 1 << 20}  # many times the L2 of an H200, 60 MB
_MOST_SETS = 256  # nodes of a graph that small caches may cost
_NUM_NEWEST = 4  # keys of a request that every query finds by its last column
_QUERY_MARK = 8.0


@dataclass(frozen=True)
class DecodeCase:
    """Requests of one length; the new tokens of each are the last ones of its context, so the causal bound cuts into it.

    Attributes:
        batch: requests.
        context: cached tokens of each request, the new ones among them.
        query_len: new tokens of each request.
    """

    batch: int
    context: int
    num_heads: int
    query_len: int

    @property
    def num_tokens(self) -> int:
        """T, the new tokens of all requests."""
        return self.batch * self.query_len

    @property
    def flops(self) -> int:
        """Scores over 576 and values over 512, for the keys that each query token sees."""
        pairs = self.batch * sum(self.context - later for later in range(self.query_len))
        return 2 * self.num_heads * pairs * (LATENT_DIM + ROPE_DIM + LATENT_DIM)

    def num_bytes(self, itemsize: int) -> int:
        """The cache, the queries and the output, each moved once."""
        cached = self.batch * self.context * (LATENT_DIM + ROPE_DIM)
        rows = self.num_tokens * self.num_heads * (LATENT_DIM + ROPE_DIM + LATENT_DIM)
        return (cached + rows) * itemsize


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches on work that does nothing else: FLOP/s of a matrix product, bytes/s of a read."""

    flops_per_second: float
    bytes_per_second: float

    def floor_us(self, case: DecodeCase, itemsize: int) -> float:
        """Microseconds below which no kernel can be."""
        return max(case.flops / self.flops_per_second, case.num_bytes(itemsize) / self.bytes_per_second) * 1e6


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Time a product of 8192 x 8192 matrices and the maximum over 2 GiB (on CPUs: 256 and 1 MiB)."""
    size, num_bytes = (8192, 2 << 30) if device.type == "cuda" else (256, 1 << 20)
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    product = time_operation(lambda _: left @ right, device, 2)
    words = torch.randint(1 << 30, (num_bytes // 4,), device=device, dtype=torch.int32)
    read = time_operation(lambda _: words.max(), device, 2)
    return Ceilings(2 * size**3 / product.median_us * 1e6, num_bytes / read.median_us * 1e6)


class Caches:
    """As many caches of `batch` requests as exceed the L2 many times over, each with shuffled blocks and a table of its own.

    Each of a request's newest keys moves the output as much as all others do, so that a causal bound that is missed shows.

    Attributes:
        rows: [num_sets, num_blocks, block_size, 576].
        block_tables: [num_sets, batch, max_blocks] int32.
    """

    def __init__(self, batch: int, context: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        max_blocks = -(-context // block_size)
        shape = (batch * max_blocks, block_size, LATENT_DIM + ROPE_DIM)
        set_bytes = batch * max_blocks * block_size * (LATENT_DIM + ROPE_DIM) * dtype.itemsize
        num_sets = min(_MOST_SETS, max(2, -(-_ROTATED_BYTES[device.type] // set_bytes)))
        self.rows = torch.empty(num_sets, *shape, dtype=dtype, device=device)
        for rows in self.rows:
            rows.normal_()
        tables = [torch.randperm(batch * max_blocks, device=device).view(batch, max_blocks) for _ in range(num_sets)]
        self.block_tables = torch.stack(tables).to(torch.int32)
        newest = torch.arange(max(0, context - _NUM_NEWEST), context, device=device)
        # The mean of S random values shrinks with sqrt(S), and so does the weight that stands up to it: exp of this score over S.
        score = 2.0 + 0.5 * math.log(context)
        for rows, table in zip(self.rows, tables, strict=True):
            rows[table[:, newest // block_size], newest % block_size, -1] = score / (_QUERY_MARK * SCALE)

    def __len__(self) -> int:
        return len(self.rows)


class DecodeInputs:
    """A case's inputs: call i of a kernel takes set i % num_sets.

    Attributes:
        seq_lens: [T] int32, the keys that each query token sees.
        context_lens: [batch] int32; query_start_loc: [batch + 1] int32. For kernels with lengths of requests.
    """

    def __init__(self, case: DecodeCase, caches: Caches) -> None:
        self.case, self.caches = case, caches
        rows = caches.rows
        new: dict[str, Any] = {"dtype": torch.int32, "device": rows.device}
        self.q = torch.empty(len(caches), case.num_tokens, case.num_heads, rows.shape[-1], dtype=rows.dtype, device=rows.device).normal_()
        self.q[..., -1] = _QUERY_MARK
        self.seq_lens = torch.arange(case.context - case.query_len + 1, case.context + 1, **new).repeat(case.batch)
        self.context_lens = torch.full((case.batch,), case.context, **new)
        self.query_start_loc = torch.arange(case.batch + 1, **new) * case.query_len
        self.workspace = decode_workspace(rows.device)

    @property
    def block_size(self) -> int:
        return self.caches.rows.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    def at(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, 576], kv_cache [num_blocks, block_size, 576] and block_table [batch, max_blocks] of a call."""
        number = index % len(self.caches)
        return self.q[number], self.caches.rows[number], self.caches.block_tables[number]


class Answer:
    """What a call must give for the first and the last request, in float64 from `attention/reference.py`."""

    def __init__(self, inputs: DecodeInputs, index: int) -> None:
        case, (q, kv_cache, block_table) = inputs.case, inputs.at(index)
        requests = torch.tensor(sorted({0, case.batch - 1}), device=q.device)
        self.tokens = (requests[:, None] * case.query_len + torch.arange(case.query_len, device=q.device)).flatten()
        blocks = block_table[requests]
        self.out, self.lse = reference.mla_decode(
            q[self.tokens].double(),
            kv_cache[blocks.flatten().long()].double(),
            torch.arange(blocks.numel(), device=q.device, dtype=torch.int32).view_as(blocks),
            inputs.seq_lens[self.tokens],
            SCALE,
            LATENT_DIM,
            None,
            case.query_len,
        )

    def errors(self, out: Tensor, lse: Tensor) -> tuple[float, float]:
        """||out - answer|| / ||answer|| and the largest |lse - answer|, of out [T, H, 512] and lse [T, H]; NaN where any is."""
        error = (out[self.tokens].double() - self.out).norm() / self.out.norm()
        return float(error), float((lse[self.tokens].double() - self.lse).abs().max())
