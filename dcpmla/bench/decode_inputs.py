"""Inputs of decode kernels: a case's sizes, its rotated inputs and the float64 answer."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpmla.attention.backends import reference
from dcpmla.attention.backends.calls import DecodeCall, decode_workspace, split_queries
from dcpmla.bench.cache_formats import (
    Q_SCALE,
    fill_randomly,
    kv_scale_of,
    scale_tensor,
    storage_dtype,
)
from dcpmla.bench.timing import num_rotated
from dcpmla.cache import formats

LATENT_DIM, ROPE_DIM = 512, 64  # widths that every kernel here is built for
SCALE = (128 + ROPE_DIM) ** -0.5  # heads before absorption have 128 columns without positions, 64 with
_NUM_NEWEST = 4  # keys of a request that every query finds by its last column
_QUERY_MARK = 8.0


class DecodeCase(NamedTuple):
    """Requests of one length; each one's new tokens are the last ones of its context, so the causal bound cuts into it.

    Attributes:
        batch: Number of requests.
        context: Cached tokens of each request, including the new ones.
        query_len: New tokens of each request.
        kv_cache_dtype: Format from `dcpmla.planning.capacity.FORMATS`.
        decode_query_dtype: Format of queries; "fp8" for e4m3, over an fp8 cache.
    """

    batch: int
    context: int
    heads: int
    query_len: int
    kv_cache_dtype: str = "bf16"
    decode_query_dtype: str = "auto"

    @property
    def num_tokens(self) -> int:
        """Return T, the new tokens of all requests."""
        return self.batch * self.query_len

    @property
    def flops(self) -> int:
        """Return the operations of scores over 576 and values over 512 columns, for the keys that each token sees."""
        pairs = self.batch * sum(self.context - later for later in range(self.query_len))
        return 2 * self.heads * pairs * (LATENT_DIM + ROPE_DIM + LATENT_DIM)

    def num_bytes(self, itemsize: int) -> int:
        """Return the bytes of cache, queries and output, each moved once; itemsize is for unquantized tensors."""
        storage = storage_dtype(self.kv_cache_dtype, torch.bfloat16)
        row_bytes = formats.row_width(storage, LATENT_DIM, ROPE_DIM) * (
            itemsize if storage == torch.bfloat16 else storage.itemsize
        )
        query_bytes = (LATENT_DIM + ROPE_DIM) * (1 if self.decode_query_dtype == "fp8" else itemsize)
        head_bytes = query_bytes + LATENT_DIM * itemsize
        return self.batch * self.context * row_bytes + self.num_tokens * self.heads * head_bytes


class Caches:
    """Caches of `batch` requests, enough to exceed the L2 many times over, each with shuffled blocks and its own table.

    Each of a request's newest keys has the weight of all other keys, so that a missed causal bound shows.

    Args:
        dtype: Dtype of latents before they are quantized, and of plain rows.
        kv_cache_dtype: Format from `dcpmla.planning.capacity.FORMATS`.
    Attributes:
        rows: Cached rows [num_sets, num_blocks, block_size, row_width].
        kv_scale: Scale of an fp8 cache, else None.
        block_tables: Block ids [num_sets, batch, max_blocks], int32.
        head_dim: Width of a query.
    """

    head_dim = LATENT_DIM + ROPE_DIM

    def __init__(
        self,
        batch: int,
        context: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_cache_dtype: str = "bf16",
    ) -> None:
        self.dtype, self.kv_cache_dtype = dtype, kv_cache_dtype
        storage = storage_dtype(kv_cache_dtype, dtype)
        self.kv_scale = kv_scale_of(storage, device)
        max_blocks = -(-context // block_size)
        shape = (batch * max_blocks, block_size, formats.row_width(storage, LATENT_DIM, ROPE_DIM))
        num_sets = max(2, num_rotated(math.prod(shape) * storage.itemsize, device))
        self.rows = torch.empty(num_sets, *shape, dtype=storage, device=device)
        fill_randomly(self.rows, LATENT_DIM, dtype)
        tables = [torch.randperm(batch * max_blocks, device=device).view(batch, max_blocks) for _ in range(num_sets)]
        self.block_tables = torch.stack(tables).to(torch.int32)
        self._mark_newest(context)

    def __len__(self) -> int:
        return len(self.rows)

    def _mark_newest(self, context: int) -> None:
        block_size, device = self.rows.shape[2], self.rows.device
        newest = torch.arange(max(0, context - _NUM_NEWEST), context, device=device)
        # The mean of S random values shrinks with sqrt(S), and so does the weight that equals it: exp of this score
        # over S.
        score = 2.0 + 0.5 * math.log(context)
        for rows, table in zip(self.rows, self.block_tables.long(), strict=True):
            blocks = table[:, newest // block_size]
            latents = torch.randn(*blocks.shape, LATENT_DIM + ROPE_DIM, dtype=self.dtype, device=device)
            latents[..., -1] = score / (_QUERY_MARK * SCALE)
            kv_c, k_pe = latents.flatten(0, 1).split([LATENT_DIM, ROPE_DIM], -1)
            rows[blocks.flatten(), (newest % block_size).repeat(len(blocks))] = formats.to_cache_rows(
                kv_c, k_pe, rows.dtype, self.kv_scale
            )


class DecodeInputs:
    """A case's inputs: call i of a kernel takes set i % num_sets.

    Attributes:
        dtype: Dtype of the output and of unquantized tensors.
        q: Queries [num_sets, T, H, head_dim], in `dtype`, or e4m3 with its q_scale, which is None otherwise.
        seq_lens: Number of keys that each query token sees [T], int32.
        context_lens: Lengths [batch], int32; query_start_loc: Starts [batch + 1], int32; for kernels that take lengths
            of requests.
        selected_blocks: Cache in blocks where `caches` has it in single rows, else None.
    """

    selected_blocks: Tensor | None = None

    def __init__(self, case: DecodeCase, caches: Caches) -> None:
        self.case, self.caches, self.dtype = case, caches, caches.dtype
        device = caches.rows.device
        new: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.q = torch.randn(len(caches), case.num_tokens, case.heads, caches.head_dim, dtype=self.dtype, device=device)
        self.q[..., -1] = _QUERY_MARK
        self.q_scale: Tensor | None = None
        if case.decode_query_dtype == "fp8":
            self.q_scale = scale_tensor(Q_SCALE, device)
            self.q = formats.to_fp8(self.q, self.q_scale)
        self.seq_lens = torch.arange(case.context - case.query_len + 1, case.context + 1, **new).repeat(case.batch)
        self.context_lens = torch.full((case.batch,), case.context, **new)
        self.query_start_loc = torch.arange(case.batch + 1, **new) * case.query_len
        self.workspace = decode_workspace(device)
        self.block_size = caches.rows.shape[2]

    def at(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a call's q [T, H, head_dim], kv_cache [num_blocks, block_size, row_width] and block_table [batch,
        max_blocks].
        """
        number = index % len(self.caches)
        return self.q[number], self.caches.rows[number], self.caches.block_tables[number]

    def call(self, index: int, backend: str = "auto") -> DecodeCall:
        """Return a call of our kernels."""
        q, kv_cache, block_table = self.at(index)
        return DecodeCall(
            *split_queries(q, LATENT_DIM),
            kv_cache,
            block_table,
            self.seq_lens,
            SCALE,
            LATENT_DIM,
            max_query_len=self.case.query_len,
            workspace=self.workspace,
            kv_scale=self.caches.kv_scale,
            q_scale=self.q_scale,
            dtype=self.dtype,
            backend=backend,
        )


class Answer:
    """The float64 result of a call for the first and the last request, from `attention/backends/reference.py`.

    It takes the quantized inputs, so that errors are the kernel's, not the format's.
    """

    def __init__(self, inputs: DecodeInputs, index: int) -> None:
        case, call = inputs.case, inputs.call(index)
        requests = torch.tensor(sorted({0, case.batch - 1}), device=inputs.q.device)
        self.tokens = (
            requests[:, None] * case.query_len + torch.arange(case.query_len, device=requests.device)
        ).flatten()
        q_pe = None if call.q_pe is None else call.q_pe[self.tokens]
        some = call._replace(q=call.q[self.tokens], q_pe=q_pe, block_table=call.block_table[requests])
        lens = call.seq_lens[self.tokens]
        self.out, self.lse = reference.mla_decode(some._replace(seq_lens=lens, workspace=None, dtype=torch.float64))

    def errors(self, out: Tensor, lse: Tensor) -> tuple[float, float]:
        """Return ||out - answer|| / ||answer|| and the largest |lse - answer|, of out [T, H, 512] and lse [T, H]; NaN
        where any is.
        """
        error = (out[self.tokens].double() - self.out).norm() / self.out.norm()
        return float(error), float((lse[self.tokens].double() - self.lse).abs().max())
