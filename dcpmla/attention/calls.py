"""The arguments of one attention call, decode or prefill: checked once, then handed to a backend whole."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpmla.cache import formats, shared_rows

COUNTER_WORDS = 1024  # int32 counters at the front of a workspace, all zero between calls
_ROWS_PER_PROCESSOR = 128  # partial rows that the programs of one multiprocessor leave at most: two tiles of 64
_WORDS_PER_ROW = 512 + 1  # a latent in float32, and its LSE
_Q_FP8 = "e4m3 queries, and they alone, go with an fp8 cache, q_scale and the output's dtype"


Queries = Tensor | tuple[Tensor, Tensor]  # [T, H, L + R], or their parts [T, H, L] and [T, H, R]


@dataclass(frozen=True)
class DecodeCall:
    """The arguments of one decode call. `dcpmla.mla_decode` documents them; `check` makes one from a caller's.

    Attributes:
        q: [T, H, kv_lora_rank], the part of queries that meets the latents.
        q_pe: [T, H, rope], the part that meets the rope part of keys; None where keys are shared.
        dtype: of the output.
        backend: name of the backend that must run the call, or "auto".
    """

    q: Tensor
    q_pe: Tensor | None
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    scale: float
    kv_lora_rank: int
    query_start_loc: Tensor | None
    max_query_len: int
    workspace: Tensor | None
    kv_scale: Tensor | None
    q_scale: Tensor | None
    dtype: torch.dtype
    backend: str = "auto"

    @classmethod
    def check(
        cls,
        q: Queries,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        scale: float,
        kv_lora_rank: int,
        query_start_loc: Tensor | None = None,
        max_query_len: int = 1,
        workspace: Tensor | None = None,
        kv_scale: Tensor | None = None,
        q_scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> "DecodeCall":
        """Return the call of these arguments, with what may be left out filled in.

        Raises:
            ValueError: as `dcpmla.mla_decode` documents.
        """
        q, q_pe = _split_queries(q, kv_lora_rank)
        _check_cache(kv_cache, kv_lora_rank, 0 if q_pe is None else q_pe.shape[-1])
        _check_requests(q, block_table, seq_lens, query_start_loc)
        if not scale > 0:
            raise ValueError(f"scale is {scale}; it must be positive")
        if max_query_len < 1:
            raise ValueError(f"max_query_len is {max_query_len}; it must be at least 1")
        if query_start_loc is None and q.shape[0] != block_table.shape[0] * max_query_len:
            raise ValueError(
                f"q has {q.shape[0]} tokens for {block_table.shape[0]} requests; without query_start_loc each has "
                f"max_query_len, {max_query_len}"
            )
        if workspace is not None and (workspace.dtype, workspace.ndim, workspace.device) != (
            torch.float32,
            1,
            q.device,
        ):
            found = f"{workspace.dtype} {tuple(workspace.shape)} on {workspace.device}"
            raise ValueError(f"workspace is {found}; it comes from decode_workspace({str(q.device)!r})")
        others: dict[str, Tensor | None] = {"kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
        others |= {"query_start_loc": query_start_loc, "kv_scale": kv_scale, "q_scale": q_scale}
        for name, tensor in others.items():
            if tensor is not None and tensor.device != q.device:
                raise ValueError(f"{name} is on {tensor.device}; it must be on q's device, {q.device}")
        if q_pe is None and formats.FP8 in (q.dtype, kv_cache.dtype):
            raise ValueError(
                f"q has dtype {q.dtype} and kv_cache {kv_cache.dtype}; queries of shared keys "
                "(without a rope part) have 16 bits or more, and so has their cache, or it is torch.uint8 (fp8_ds_mla)"
            )
        dtype = _output_dtype(q, kv_cache, kv_scale, q_scale, dtype)
        return cls(
            q,
            q_pe,
            kv_cache,
            block_table,
            seq_lens,
            scale,
            kv_lora_rank,
            query_start_loc,
            max_query_len,
            workspace,
            kv_scale,
            q_scale,
            dtype,
            backend,
        )

    def flat(self) -> tuple[Any, ...]:
        """Return the arguments in the order of the fields, for the custom op, which takes no dataclass."""
        return (
            self.q,
            self.q_pe,
            self.kv_cache,
            self.block_table,
            self.seq_lens,
            self.scale,
            self.kv_lora_rank,
            self.query_start_loc,
            self.max_query_len,
            self.workspace,
            self.kv_scale,
            self.q_scale,
            self.dtype,
            self.backend,
        )

    @property
    def keys_are_shared(self) -> bool:
        """Return whether rows of the cache are keys and values at once, without a part for scores alone."""
        return self.q_pe is None

    @property
    def rope_dim(self) -> int:
        """Return the width of the rope part of queries and keys: 0 where keys are shared."""
        return 0 if self.q_pe is None else self.q_pe.shape[-1]

    @property
    def is_planar(self) -> bool:
        """Return whether the cache has pages of fp8_ds_mla for shared keys (`cache.shared_rows`)."""
        return self.keys_are_shared and self.kv_cache.dtype == torch.uint8

    @property
    def block_size(self) -> int:
        """Tokens of an entry of the block table; 1 where it holds numbers of rows."""
        return 1 if self.is_planar else self.kv_cache.shape[1]

    @property
    def has_one_token_each(self) -> bool:
        """Return whether every request brings one query token."""
        return self.query_start_loc is None and self.max_query_len == 1

    def new_output(self, num_ranks: int = 1) -> tuple[Tensor, Tensor]:
        """Allocate out [T, H / num_ranks, kv_lora_rank] and lse [T, H / num_ranks] float32."""
        shape = self.q.shape[0], self.q.shape[1] // num_ranks
        out = self.q.new_empty(*shape, self.kv_lora_rank, dtype=self.dtype)
        return out, self.q.new_empty(shape, dtype=torch.float32)

    def get_workspace(self) -> Tensor:
        """Return the caller's workspace, or a new one. For GPU kernels that split requests."""
        workspace = decode_workspace(self.q.device) if self.workspace is None else self.workspace
        assert workspace is not None
        return workspace


class Segments(NamedTuple):
    """Row ranges of the requests in a flat ragged batch.

    Attributes:
        start: [num_reqs + 1], on the host, where each request's rows start and the last one's end.
        start_loc: [num_reqs + 1] int32, the same on the device of the rows.
    """

    start: tuple[int, ...]
    start_loc: Tensor

    @property
    def lens(self) -> list[int]:
        """[num_reqs] rows of each request, on the host."""
        return [end - start for start, end in zip(self.start, self.start[1:], strict=False)]


@dataclass(frozen=True)
class PrefillCall:
    """The arguments of one call of multi-head attention over a ragged batch.

    Attributes:
        q: [T, h, P + R].
        k_nope, k_pe, v: [S, h, P], [S, R], [S, h, V] with S > 0; a head's key is its part of k_nope, then k_pe.
            Views with any strides but contiguous columns.
        queries, keys: the requests' rows in T, in S.
        scale: factor of the scores, positive.
        causal: query j of a request sees its first j + 1 keys (there are as many keys as queries); else all.
        mask: [T, W] int32 from `selection_mask`, contiguous: which of those a query sees; None for all.
        backend: name of the backend that must run the call, or "auto".

    A backend returns out [T, h, V] in the dtype of q and lse [T, h] float32, natural log, contiguous; (0, -inf) for
    a query that sees no key.
    """

    q: Tensor
    k_nope: Tensor
    k_pe: Tensor
    v: Tensor
    queries: Segments
    keys: Segments
    scale: float
    causal: bool
    mask: Tensor | None = None
    backend: str = "auto"


def join_keys(k_nope: Tensor, k_pe: Tensor) -> Tensor:
    """Copy keys [S, h, P] and [S, R] into one tensor [S, h, P + R], for kernels that want them so."""
    return torch.cat([k_nope, k_pe[:, None].expand(-1, k_nope.shape[1], -1)], -1)


def decode_workspace(device: torch.device | str) -> Tensor | None:
    """Allocate the memory in which decode kernels leave partial rows of requests that are split over programs.

    Consecutive calls on one stream may share it (a step's layers, a graph's replays); calls that run at the same
    time may not.

    Returns:
        float32 [N], its counters zero and the rest uninitialized: 35 MB on an H200. None where no kernel needs it.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    workspace = torch.empty(COUNTER_WORDS + num_processors * _ROWS_PER_PROCESSOR * _WORDS_PER_ROW, device=device)
    workspace[:COUNTER_WORDS].zero_()
    return workspace


def num_programs(workspace: Tensor, rows: int) -> int:
    """Return how many programs may share a workspace when each leaves up to two partial outputs of so many rows."""
    return min(COUNTER_WORDS, (workspace.numel() - COUNTER_WORDS) // (2 * rows * _WORDS_PER_ROW))


def _split_queries(q: Queries, kv_lora_rank: int) -> tuple[Tensor, Tensor | None]:
    """Return the parts of queries, views of joined ones."""
    if isinstance(q, Tensor):
        if q.ndim != 3 or not 0 < kv_lora_rank <= q.shape[-1]:
            raise ValueError(
                f"q has shape {tuple(q.shape)}; expected [T, H, kv_lora_rank + rope] with kv_lora_rank {kv_lora_rank}"
            )
        return q[..., :kv_lora_rank], q[..., kv_lora_rank:] if q.shape[-1] > kv_lora_rank else None
    latent, rope = q
    is_split = latent.ndim == rope.ndim == 3 and latent.shape[:2] == rope.shape[:2] and rope.shape[-1] > 0
    if not is_split or not 0 < kv_lora_rank == latent.shape[-1]:
        raise ValueError(
            f"q has parts of shapes {tuple(latent.shape)} and {tuple(rope.shape)}; expected [T, H, kv_lora_rank] and "
            f"[T, H, rope] with kv_lora_rank {kv_lora_rank}"
        )
    if (latent.dtype, latent.device) != (rope.dtype, rope.device):
        raise ValueError(
            f"q has parts of {latent.dtype} on {latent.device} and {rope.dtype} on {rope.device}; they must be alike"
        )
    return latent, rope


def _check_cache(kv_cache: Tensor, kv_lora_rank: int, rope_dim: int) -> None:
    if rope_dim == 0 and kv_cache.dtype == torch.uint8:
        _, *page = shared_rows.rows_shape(0, kv_lora_rank, kv_cache.dtype)
        if kv_cache.ndim != 3 or [*kv_cache.shape[1:]] != page:
            raise ValueError(
                f"kv_cache has shape {tuple(kv_cache.shape)}; expected [num_pages, {page[0]}, {page[1]}] for "
                f"fp8_ds_mla rows of {kv_lora_rank} shared keys"
            )
        return
    width = formats.row_width(kv_cache.dtype, kv_lora_rank, rope_dim)
    if kv_cache.ndim != 3 or kv_cache.shape[-1] != width:
        raise ValueError(
            f"kv_cache has shape {tuple(kv_cache.shape)}; expected [num_blocks, block_size, {width}] to match q"
        )


def _check_requests(q: Tensor, block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor | None) -> None:
    num_tokens = q.shape[0]
    if block_table.ndim != 2 or ((block_table.shape[0] == 0 or num_tokens == 0) and block_table.shape[0] != num_tokens):
        raise ValueError(
            f"block_table has shape {tuple(block_table.shape)}; expected [num_reqs, max_blocks], a row for each request"
        )
    num_reqs = block_table.shape[0]
    if tuple(seq_lens.shape) != (num_tokens,):
        raise ValueError(
            f"seq_lens has shape {tuple(seq_lens.shape)}; expected [{num_tokens}], one for each query token"
        )
    if query_start_loc is not None and tuple(query_start_loc.shape) != (num_reqs + 1,):
        raise ValueError(
            f"query_start_loc has shape {tuple(query_start_loc.shape)}; expected [{num_reqs + 1}], num_reqs + 1"
        )
    for name, numbers in (("block_table", block_table), ("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
        if numbers is not None and (numbers.dtype != torch.int32 or numbers.stride(-1) != 1):
            raise ValueError(
                f"{name} has dtype {numbers.dtype} and strides {numbers.stride()}; expected int32 with contiguous rows"
            )


def _output_dtype(
    q: Tensor, kv_cache: Tensor, kv_scale: Tensor | None, q_scale: Tensor | None, dtype: torch.dtype | None
) -> torch.dtype:
    """Check that dtypes and scales belong together, and return the output's dtype."""
    formats.check_kv_scale(kv_cache.dtype, kv_scale)
    given = "missing" if q_scale is None else "given"
    found = f"q has dtype {q.dtype}, kv_cache {kv_cache.dtype}, q_scale is {given} and dtype is {dtype}"
    if q.dtype != formats.FP8:
        if not q.dtype.is_floating_point or q.element_size() < 2:
            raise ValueError(f"q has dtype {q.dtype}; it must be a float dtype of 16 bits or more, or e4m3")
        if not formats.is_quantized(kv_cache.dtype) and kv_cache.dtype != q.dtype:
            raise ValueError(f"kv_cache has dtype {kv_cache.dtype}; expected q's, {q.dtype}, or one of 8 bits")
        if q_scale is not None or dtype not in (None, q.dtype):
            raise ValueError(f"{found}; {_Q_FP8}")
        return q.dtype
    if kv_cache.dtype != formats.FP8 or q_scale is None or dtype is None:
        raise ValueError(f"{found}; {_Q_FP8}")
    if q_scale.dtype != torch.float32 or q_scale.numel() != 1:
        raise ValueError(f"q_scale is {q_scale.dtype} {tuple(q_scale.shape)}; expected torch.float32 of one element")
    return dtype
