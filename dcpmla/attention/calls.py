"""The arguments of one attention call, decode or prefill: checked once, then passed to a backend as one object."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.attention.decode_checks import check_cache, check_dtypes, check_requests
from dcpmla.cache import formats

COUNTER_WORDS = 1024  # int32 counters at the front of a workspace, all zero between calls
_ROWS_PER_PROCESSOR = 128  # partial rows that the programs of one multiprocessor leave at most: two tiles of 64
_WORDS_PER_ROW = 512 + 1  # a latent in float32, and its LSE


class DecodeCall(NamedTuple):
    """The arguments of one decode call, as the custom op takes them; `dcpmla.mla_decode` documents them.

    Attributes:
        q: Part of the queries that is multiplied by latents [T, H, kv_lora_rank].
        q_pe: Part that is multiplied by the rope part of keys [T, H, rope]; None where keys are shared.
    """

    q: Tensor
    q_pe: Tensor | None
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    scale: float
    kv_lora_rank: int
    request_index: Tensor | None = None
    query_start_loc: Tensor | None = None
    max_query_len: int = 1
    workspace: Tensor | None = None
    kv_scale: Tensor | None = None
    q_scale: Tensor | None = None
    dtype: torch.dtype | None = None
    backend: str = "auto"

    def checked(self) -> "DecodeCall":
        """Return the call if its arguments match.

        Raises:
            ValueError: The reasons that `dcpmla.mla_decode` documents.
        """
        q, kv_cache, workspace = self.q, self.kv_cache, self.workspace
        check_cache(kv_cache, self.kv_lora_rank, self.rope_dim)
        num_reqs = check_requests(q, self.block_table, self.seq_lens, self.request_index, self.query_start_loc)
        if not self.scale > 0:
            raise ValueError(f"scale is {self.scale}; it must be positive")
        if self.max_query_len < 1:
            raise ValueError(f"max_query_len is {self.max_query_len}; it must be at least 1")
        if self.query_start_loc is None and q.shape[0] != num_reqs * self.max_query_len:
            raise ValueError(
                f"q has {q.shape[0]} tokens for {num_reqs} requests; without query_start_loc each has "
                f"max_query_len, {self.max_query_len}"
            )
        if workspace is not None and (workspace.dtype, workspace.ndim, workspace.device) != (
            torch.float32,
            1,
            q.device,
        ):
            found = f"{workspace.dtype} {tuple(workspace.shape)} on {workspace.device}"
            raise ValueError(f"workspace is {found}; it comes from decode_workspace({str(q.device)!r})")
        for name, value in zip(self._fields, self, strict=True):
            if isinstance(value, Tensor) and value.device != q.device:
                raise ValueError(f"{name} is on {value.device}; it must be on q's device, {q.device}")
        if self.keys_are_shared and formats.FP8 in (q.dtype, kv_cache.dtype):
            raise ValueError(
                f"q has dtype {q.dtype} and kv_cache {kv_cache.dtype}; queries of shared keys "
                "(without a rope part) have 16 bits or more, and so has their cache, or it is torch.uint8 (fp8_ds_mla)"
            )
        check_dtypes(q, kv_cache, self.kv_scale, self.q_scale, self.dtype)
        return self

    @property
    def out_dtype(self) -> torch.dtype:
        """Return the dtype of the output."""
        return self.q.dtype if self.dtype is None else self.dtype

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
        """Return whether the cache has pages of fp8_ds_mla for shared keys (`cache.shared_format`)."""
        return self.keys_are_shared and self.kv_cache.dtype == torch.uint8

    @property
    def block_size(self) -> int:
        """Return the number of tokens of a block table's entry; 1 where it holds numbers of rows."""
        return 1 if self.is_planar else self.kv_cache.shape[1]

    @property
    def num_reqs(self) -> int:
        """Return the number of requests."""
        return len(self.block_table if self.request_index is None else self.request_index)

    @property
    def has_one_token_each(self) -> bool:
        """Return whether every request brings one query token."""
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
    """Row ranges of the requests in a flat ragged batch.

    Attributes:
        start: First row of each request, then the end of the last one [num_reqs + 1], on the host.
        start_loc: The same as int32 [num_reqs + 1] on the device of the rows.
    """

    start: tuple[int, ...]
    start_loc: Tensor

    @property
    def lens(self) -> list[int]:
        """Return the number of rows of each request, on the host."""
        return [end - start for start, end in zip(self.start, self.start[1:], strict=False)]


class PrefillCall(NamedTuple):
    """The arguments of one call of multi-head attention over a ragged batch.

    Attributes:
        q: Queries [T, h, P + R].
        k_nope, k_pe, v: Keys and values [S, h, P], [S, R], [S, h, V] with S > 0; a head's key is its part of k_nope,
            then k_pe. Views with any strides but contiguous columns.
        query_start, query_start_loc, key_start, key_start_loc: Rows of the requests in T, and in S: the `Segments` of
            both.
        scale: Softmax scale, positive.
        causal: Whether query j of a request sees only its first j + 1 keys (it has as many keys as queries).
        mask: Mask of the keys that a query sees [T, W], int32, contiguous (`selection_mask`); None for no mask.
        backend: Name of the backend that must run the call, or "auto".

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
    scale: float
    causal: bool
    mask: Tensor | None = None
    backend: str = "auto"

    @property
    def queries(self) -> Segments:
        """Return the rows of the requests in T."""
        return Segments(tuple(self.query_start), self.query_start_loc)

    @property
    def keys(self) -> Segments:
        """Return the rows of the requests in S."""
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
    """Return a power of two of at least num_reqs, one of few, because kernels are compiled for each."""
    return 32 if num_reqs <= 32 else max(256, 1 << (num_reqs - 1).bit_length())


def num_programs(workspace: Tensor, rows: int) -> int:
    """Return the number of programs that can share a workspace if each writes two partial outputs of `rows` rows."""
    return min(COUNTER_WORDS, (workspace.numel() - COUNTER_WORDS) // (2 * rows * _WORDS_PER_ROW))
