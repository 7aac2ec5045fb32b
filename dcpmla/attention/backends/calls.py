"""The arguments of one attention call, decode or prefill: checked once, then passed to a backend as one object."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.cache import formats, shared_format

COUNTER_WORDS = 1024  # int32 counters at the front of a workspace, all zero between calls
_ROWS_PER_PROCESSOR = 128  # largest number of partial rows that one multiprocessor's programs write: two tiles of 64
DETERMINISTIC_ROWS = 1 << 16  # partial rows that deterministic decode may store: 134 MB with DeepSeek's latents
_WORDS_PER_ROW = 512 + 1  # a latent in float32, and its LSE

Queries = Tensor | tuple[Tensor, Tensor]  # [T, H, L + R], or their parts [T, H, L] and [T, H, R]


def shape_error(name: str, tensor: Tensor, expected: str) -> ValueError:
    """Return the error of a tensor with another shape than expected."""
    return ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {expected}")


def split_queries(q: Queries, kv_lora_rank: int) -> tuple[Tensor, Tensor | None]:
    """Return the two parts of queries, as views where they are joined."""
    if isinstance(q, Tensor):
        if q.ndim != 3 or not 0 < kv_lora_rank <= q.shape[-1]:
            raise shape_error("q", q, f"[T, H, kv_lora_rank + rope] with kv_lora_rank {kv_lora_rank}")
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


class DecodeCall(NamedTuple):
    """The arguments of one decode call.

    Attributes:
        q: Part of the queries that is multiplied by latents [T, H, kv_lora_rank], q_nope W_UK
            (`projections.absorb_query`), request by request.
        q_pe: Part that is multiplied by the rope part of keys [T, H, rope], rotated. None for DeepSeek-V4's cache,
            whose rows are "shared keys", each the key and the value of a token at once (`keys_are_shared`).
        kv_cache: Cached rows [num_blocks, block_size, kv_lora_rank + rope] in q's dtype, or in an 8-bit format
            (`cache/formats.py`). Shared keys are in q's dtype, or in pages [num_pages, 64, row_width] of fp8_ds_mla
            (`cache/shared_format.py`), which are addressed row by row.
        block_table: Block ids of each request [num_rows, max_blocks], int32, or row numbers where the cache is
            addressed by row; entries after its last block are not read.
        seq_lens: Number of tokens that each query token sees [T], int32: the first tokens of its request in this cache,
            which under DCP stores only this rank's tokens. Within a request the numbers must not decrease. The tensor
            must not be written while a kernel runs.
        softmax_scale: Factor of the scores, positive.
        kv_lora_rank: Width of the latent, which is the value.
        request_index: Row of block_table of each segment [num_segments], int32. A segment is what a kernel treats as
            one request: a request, or some of a long one's query tokens; segments of one request have the same row. If
            None, segment i has row i.
        query_start_loc: First query token of each segment, and the end [num_segments + 1], int32; None when each has
            max_query_len query tokens. Rows of q after the last segment are padding; their results are undefined.
        max_query_len: Largest number of query tokens of a segment.
        workspace: Memory from `decode_workspace` for kernels that split a request over programs; consecutive calls may
            share it. None allocates it.
        kv_scale, q_scale: Scales of an fp8 cache and of e4m3 queries, float32 of one element; else None.
        dtype: Dtype of the output; None takes q's. Required where q is e4m3.
        num_tile_lanes: Number of lanes of tiles in this rank's cache (`ownership.NUM_TILE_LANES`): deterministic
            attention, whose output is float32. None for any order of sums, and an output in `dtype`.
        backend: Name of a backend; "auto" takes the first of `choice.DECODE_BACKENDS` that can run the call.
    """

    q: Tensor
    q_pe: Tensor | None
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    softmax_scale: float
    kv_lora_rank: int
    request_index: Tensor | None = None
    query_start_loc: Tensor | None = None
    max_query_len: int = 1
    workspace: Tensor | None = None
    kv_scale: Tensor | None = None
    q_scale: Tensor | None = None
    dtype: torch.dtype | None = None
    num_tile_lanes: int | None = None
    backend: str = "auto"

    def checked(self) -> "DecodeCall":
        """Return the call if its arguments match.

        Raises:
            ValueError: The reasons that `dcpmla.mla_decode` documents.
        """
        q, workspace = self.q, self.workspace
        self._check_cache()
        self._check_requests()
        if not self.softmax_scale > 0:
            raise ValueError(f"softmax_scale is {self.softmax_scale}; it must be positive")
        expected = torch.float32, 1, q.device
        if workspace is not None and (workspace.dtype, workspace.ndim, workspace.device) != expected:
            raise ValueError(
                f"workspace is {workspace.dtype} {tuple(workspace.shape)} on {workspace.device}; expected one from "
                f"decode_workspace({str(q.device)!r})"
            )
        for name, value in zip(self._fields, self, strict=True):
            if isinstance(value, Tensor) and value.device != q.device:
                raise ValueError(f"{name} is on {value.device}; it must be on q's device, {q.device}")
        self._check_dtypes()
        if self.num_tile_lanes is not None and (self.num_tile_lanes < 1 or self.keys_are_shared or q.itemsize < 2):
            raise ValueError(
                f"num_tile_lanes is {self.num_tile_lanes} with queries of {q.dtype} and {self.rope_dim} rope columns; "
                f"attention in a fixed order takes at least 1 lane, queries of 16 bits or more, and keys with rope"
            )
        return self

    def _check_cache(self) -> None:
        """Raise ValueError for a cache whose shape does not match the queries' widths."""
        if self.is_planar:
            _, *page = shared_format.rows_shape(0, self.kv_lora_rank, self.kv_cache.dtype)
            expected, reason = ["num_pages", *page], f"for shared keys of width {self.kv_lora_rank} in fp8_ds_mla"
        else:
            width = formats.row_width(self.kv_cache.dtype, self.kv_lora_rank, self.rope_dim)
            expected, reason = ["num_blocks", "block_size", width], "to match q"
        shape = tuple(self.kv_cache.shape)
        pairs = zip(shape, expected, strict=False)  # `expected` has a name where every size is allowed
        if len(shape) != 3 or any(isinstance(allowed, int) and size != allowed for size, allowed in pairs):
            raise shape_error("kv_cache", self.kv_cache, f"[{', '.join(map(str, expected))}] {reason}")

    def _check_requests(self) -> None:
        """Raise ValueError if shapes, dtypes or strides do not match the queries' tokens."""
        num_tokens, table, index, starts = self.q.shape[0], self.block_table, self.request_index, self.query_start_loc
        if table.ndim != 2 or (table.shape[0] != num_tokens and 0 in (table.shape[0], num_tokens)):
            raise ValueError(
                f"block_table has shape {tuple(table.shape)} and q {num_tokens} tokens; expected "
                f"[num_rows, max_blocks], with num_rows 0 if q has no tokens, and at least 1 otherwise"
            )
        if index is not None and (index.ndim != 1 or table.shape[0] == 0 < index.shape[0]):
            of_table = f"a row of block_table {tuple(table.shape)} for each"
            raise shape_error("request_index", index, f"[num_segments], {of_table}")
        if tuple(self.seq_lens.shape) != (num_tokens,):
            raise shape_error("seq_lens", self.seq_lens, f"[{num_tokens}], one for each query token")
        num_segments = self.num_segments
        if starts is not None and tuple(starts.shape) != (num_segments + 1,):
            raise shape_error("query_start_loc", starts, f"[{num_segments + 1}], num_segments + 1")
        columns = {"block_table": table, "seq_lens": self.seq_lens, "request_index": index, "query_start_loc": starts}
        for name, numbers in columns.items():
            if numbers is not None and (numbers.dtype != torch.int32 or numbers.stride(-1) != 1):
                raise ValueError(
                    f"{name} has dtype {numbers.dtype} and strides {numbers.stride()}; expected int32 with contiguous "
                    f"rows"
                )
        if self.max_query_len < 1:
            raise ValueError(f"max_query_len is {self.max_query_len}; it must be at least 1")
        if starts is None and num_tokens != num_segments * self.max_query_len:
            raise ValueError(
                f"q has {num_tokens} tokens for {num_segments} segments; without query_start_loc each has "
                f"max_query_len, {self.max_query_len}"
            )

    def _check_dtypes(self) -> None:
        """Raise ValueError for dtypes and scales that do not match."""
        q, cache, q_scale, dtype = self.q.dtype, self.kv_cache.dtype, self.q_scale, self.dtype
        if self.keys_are_shared and formats.FP8 in (q, cache):
            raise ValueError(
                f"q has dtype {q} and kv_cache {cache}; queries of shared keys (without a rope part) have 16 bits or "
                f"more, and so has their cache, or it is torch.uint8 (fp8_ds_mla)"
            )
        formats.check_kv_scale(cache, self.kv_scale)
        if q == formats.FP8:
            matches = cache == formats.FP8 and q_scale is not None and dtype is not None
        else:
            if not q.is_floating_point or q.itemsize < 2:
                raise ValueError(f"q has dtype {q}; it must be a float dtype of 16 bits or more, or e4m3")
            if not formats.is_quantized(cache) and cache != q:
                raise ValueError(f"kv_cache has dtype {cache}; expected q's, {q}, or one of 8 bits")
            matches = q_scale is None and dtype in (None, q)
        if not matches:
            state = "missing" if q_scale is None else "given"
            raise ValueError(
                f"q has dtype {q}, kv_cache {cache}, q_scale is {state} and dtype is {dtype}; e4m3 queries need an fp8 "
                f"cache, q_scale and the output's dtype, other queries take no q_scale and no dtype but their own"
            )
        formats.check_scale("q_scale", q_scale)

    @property
    def out_dtype(self) -> torch.dtype:
        """Return the dtype of the output: float32 at least in a fixed order, because it is not merged yet."""
        if self.num_tile_lanes is not None:
            return torch.promote_types(self.q.dtype, torch.float32)
        return self.q.dtype if self.dtype is None else self.dtype

    @property
    def keys_are_shared(self) -> bool:
        """Return whether a row of the cache is a whole key and also the value (DeepSeek-V4); in MLA the rope part of a
        row belongs to the key alone.
        """
        return self.q_pe is None

    @property
    def rope_dim(self) -> int:
        """Return the width of the rope part of queries and keys: 0 where keys are shared."""
        return 0 if self.q_pe is None else self.q_pe.shape[-1]

    @property
    def is_planar(self) -> bool:
        """Return whether the cache is in pages of 64 shared keys in fp8_ds_mla: in a page, the data of all rows come
        first, then the scales of all rows (`cache.shared_format`).
        """
        return self.keys_are_shared and self.kv_cache.dtype == torch.uint8

    @property
    def block_size(self) -> int:
        """Return the number of rows that an entry of the block table covers: the rows of a block, or 1 if entries are
        row numbers.
        """
        return 1 if self.is_planar else self.kv_cache.shape[1]

    @property
    def num_segments(self) -> int:
        """Return the number of segments."""
        return len(self.block_table if self.request_index is None else self.request_index)

    @property
    def has_one_token_each(self) -> bool:
        """Return whether every segment has one query token, and every row of q belongs to a segment."""
        return self.query_start_loc is None and self.max_query_len == 1

    def new_output(self, num_ranks: int = 1) -> tuple[Tensor, Tensor]:
        """Allocate out [T, H / num_ranks, kv_lora_rank] and lse [T, H / num_ranks] float32."""
        shape = self.q.shape[0], self.q.shape[1] // num_ranks
        out = self.q.new_empty(*shape, self.kv_lora_rank, dtype=self.out_dtype)
        return out, self.q.new_empty(shape, dtype=torch.float32)

    def get_workspace(self) -> Tensor:
        """Return the caller's workspace, or a new one. For GPU kernels that split requests."""
        workspace = decode_workspace(self.q.device) if self.workspace is None else self.workspace
        assert workspace is not None
        return workspace


class Segments(NamedTuple):
    """Row ranges of the requests, or of the segments of cut requests, in a flat ragged batch.

    Attributes:
        start: First row of each range, then the end of the last range [num_ranges + 1], on the host.
        start_loc: The same numbers, int32, on the device of the rows.
    """

    start: tuple[int, ...]
    start_loc: Tensor

    @property
    def lens(self) -> list[int]:
        """Return the number of rows of each range, on the host."""
        return [end - start for start, end in zip(self.start, self.start[1:], strict=False)]


class PrefillCall(NamedTuple):
    """The arguments of one call of multi-head attention over a ragged batch.

    Attributes:
        q: Queries [T, h, P + R].
        k_nope, k_pe, v: Keys and values [S, h, P], [S, R], [S, h, V] with S > 0; a head's key is its part of k_nope,
            then k_pe. Views with stride 1 along a row, and any other strides.
        query_start, query_start_loc: `Segments` of the queries: rows of each request among the T queries.
        key_start, key_start_loc: `Segments` of the keys: rows of each request among the S keys.
        softmax_scale: Factor of the scores, positive.
        causal: Whether query j of a request sees only keys 0 to j of it (queries and keys are the same tokens).
        mask: Bits [T, ceil(N / 32)] in words of int32, contiguous. N is the largest number of keys of a request; a
            query sees the keys whose bits are set (`selection_mask`). None for no mask.
        backend: Name of the backend that must run the call, or "auto".
        window: Hint for a causal call with a mask: all keys that a query sees are among the last `window` ones up to
            and including its own, so a kernel may skip earlier keys. None for no hint.

    A backend returns out [T, h, V] in the dtype of q and lse [T, h] float32, natural log, contiguous; (0, -inf) for
    a query that sees no key.
    """

    q: Tensor
    k_nope: Tensor
    k_pe: Tensor
    v: Tensor
    query_start: Sequence[int]
    query_start_loc: Tensor
    key_start: Sequence[int]
    key_start_loc: Tensor
    softmax_scale: float
    causal: bool
    mask: Tensor | None = None
    backend: str = "auto"
    window: int | None = None

    @property
    def queries(self) -> Segments:
        """Return the rows of each request among the queries."""
        return Segments(tuple(self.query_start), self.query_start_loc)

    @property
    def keys(self) -> Segments:
        """Return the rows of each request among the keys."""
        return Segments(tuple(self.key_start), self.key_start_loc)


def join_keys(k_nope: Tensor, k_pe: Tensor) -> Tensor:
    """Copy keys [S, h, P] and [S, R] into one tensor [S, h, P + R], for kernels that need joined keys."""
    return torch.cat([k_nope, k_pe[:, None].expand(-1, k_nope.shape[1], -1)], -1)


def decode_workspace(device: torch.device | str) -> Tensor | None:
    """Allocate the memory to which decode kernels write partial rows of requests that are split over programs.

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


def request_bound(num_reqs: int) -> int:
    """Round num_reqs up to 32, 256, 2,048, 4,096, ...: few values, because kernels are compiled for each."""
    return next((bound for bound in (32, 256, 2048) if num_reqs <= bound), 1 << (num_reqs - 1).bit_length())


def num_programs(workspace: Tensor, rows: int) -> int:
    """Return the number of programs that can share a workspace if each writes two partial outputs of `rows` rows."""
    return min(COUNTER_WORDS, (workspace.numel() - COUNTER_WORDS) // (2 * rows * _WORDS_PER_ROW))
