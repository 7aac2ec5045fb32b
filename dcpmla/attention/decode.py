"""Decode: the newest query tokens of each request, all heads of the DCP group over this rank's tokens, merged across
ranks.
"""

import torch
from torch import Tensor

from dcpmla.attention.backends import select_decode
from dcpmla.attention.projections import project_values
from dcpmla.attention.step import DecodeMetadata
from dcpmla.cache import formats
from dcpmla.comm.exchange import Exchange

_Q_FP8 = "e4m3 queries, and they alone, go with an fp8 cache, q_scale and the output's dtype"


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int = 512,
    *,
    query_start_loc: Tensor | None = None,
    max_query_len: int | None = None,
    workspace: Tensor | None = None,
    kv_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of absorbed queries over a paged latent cache on one rank.

    Args:
        q: [T, H, kv_lora_rank + rope], the query tokens of one request after the other: [ql_nope | q_pe].
        kv_cache: [num_blocks, block_size, kv_lora_rank + rope].
        block_table: [num_reqs, max_blocks] int32, block ids of each request; entries behind its last block are not
        read.
        seq_lens: [T] int32, for each query token how many of its request's first tokens in this cache it sees.
            Under DCP this is the
            causal bound, cut to this rank: tokens of a request see as many as the one before or more. It must not
            change while a kernel runs.
        scale: factor of the scores, positive.
        kv_lora_rank: width of the latent, which is the value.
        query_start_loc: [num_reqs + 1] int32, where each request's query tokens start; None when all have T /
            num_reqs of them. Rows of q behind the last request's are padding: what comes out for them carries no
            meaning.
        max_query_len: most query tokens of a request; asked for with query_start_loc.
        workspace: from `decode_workspace`, for kernels that split a request over programs; calls in a row may share
        one. None makes one.
        kv_scale, q_scale: float32 of one element on q's device, what an fp8 cache and e4m3 queries are to be
        multiplied by; for them alone.
        dtype: of the output; None takes q's. Asked for where q is e4m3.
    Returns:
        out [T, H, kv_lora_rank], lse [T, H] float32 natural log; (0, -inf) for a query that sees no token.
    Raises:
        ValueError: shapes that do not belong together, numbers that are not int32 or not contiguous, a scale that
            is not positive, a workspace that `decode_workspace` would not have made, scales or dtypes that do not
            belong together.
    Source: DeepSeek-V2, section 2.1 (the up-projections absorbed into query and output).
    """
    what = q, kv_cache, block_table, seq_lens, scale, kv_lora_rank
    max_query_len = _check(*what, query_start_loc, max_query_len, workspace)
    dtype = _check_dtypes(q, kv_cache, kv_scale, q_scale, dtype)
    return torch.ops.dcpmla.mla_decode(*what, query_start_loc, max_query_len, workspace, kv_scale, q_scale, dtype)


def _check(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int,
    query_start_loc: Tensor | None,
    max_query_len: int | None,
    workspace: Tensor | None,
) -> int:
    """max_query_len, also where it is not given."""
    if q.ndim != 3 or not 0 < kv_lora_rank <= q.shape[-1]:
        raise ValueError(
            f"q has shape {tuple(q.shape)}; expected [T, H, kv_lora_rank + rope] with kv_lora_rank {kv_lora_rank}"
        )
    width = formats.row_width(kv_cache.dtype, kv_lora_rank, q.shape[-1] - kv_lora_rank)
    if kv_cache.ndim != 3 or kv_cache.shape[-1] != width:
        raise ValueError(
            f"kv_cache has shape {tuple(kv_cache.shape)}; expected [num_blocks, block_size, {width}] to match q"
        )
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
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it must be positive")
    if query_start_loc is not None and tuple(query_start_loc.shape) != (num_reqs + 1,):
        raise ValueError(
            f"query_start_loc has shape {tuple(query_start_loc.shape)}; expected [{num_reqs + 1}], num_reqs + 1"
        )
    for name, numbers in (("block_table", block_table), ("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
        if numbers is not None and (numbers.dtype != torch.int32 or numbers.stride(-1) != 1):
            raise ValueError(
                f"{name} has dtype {numbers.dtype} and strides {numbers.stride()}; it must be int32 with contiguous rows"
            )
    if workspace is not None and (workspace.dtype, workspace.ndim, workspace.device) != (torch.float32, 1, q.device):
        found = f"{workspace.dtype} {tuple(workspace.shape)} on {workspace.device}"
        raise ValueError(f"workspace is {found}; it comes from decode_workspace({str(q.device)!r})")
    if query_start_loc is None:
        max_query_len = _uniform_query_len(num_tokens, num_reqs, max_query_len)
    elif max_query_len is None or max_query_len < 1:
        raise ValueError(
            f"max_query_len is {max_query_len}; query_start_loc asks for the most query tokens of a request, at least 1"
        )
    return max_query_len


def _check_dtypes(
    q: Tensor, kv_cache: Tensor, kv_scale: Tensor | None, q_scale: Tensor | None, dtype: torch.dtype | None
) -> torch.dtype:
    """The output's dtype."""
    formats.check_kv_scale(kv_cache.dtype, kv_scale)
    for name, number in (("kv_scale", kv_scale), ("q_scale", q_scale)):
        if number is not None and number.device != q.device:
            raise ValueError(
                f"{name} is on {number.device}; it must be on q's device, {q.device}: kernels read it there"
            )
    given = "missing" if q_scale is None else "given"
    if q.dtype != formats.FP8:
        if q_scale is not None or dtype not in (None, q.dtype):
            raise ValueError(f"q has dtype {q.dtype}, q_scale is {given} and dtype is {dtype}; {_Q_FP8}")
        return q.dtype
    if kv_cache.dtype != formats.FP8 or q_scale is None or dtype is None:
        raise ValueError(
            f"q has dtype {q.dtype}, kv_cache {kv_cache.dtype}, q_scale is {given} and dtype is {dtype}; {_Q_FP8}"
        )
    if q_scale.dtype != torch.float32 or q_scale.numel() != 1:
        raise ValueError(f"q_scale is {q_scale.dtype} {tuple(q_scale.shape)}; expected torch.float32 of one element")
    return dtype


def dcp_mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    decode: DecodeMetadata,
    scale: float,
    exchange: Exchange,
    kv_lora_rank: int = 512,
    *,
    q_is_replicated: bool = False,
    w_uv: Tensor | None = None,
    kv_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla_decode` over a cache that is sharded over the DCP group. Collective.

    Args:
        q: [T, h, kv_lora_rank + rope], this rank's heads; with q_is_replicated [T, W h, ...], those of all W ranks,
        in rank order.
        decode: the step's, with this rank's lengths; the other arguments are those of `mla_decode`.
        w_uv: [W h, V, kv_lora_rank] of all ranks' heads, to merge values in place of latents; the same on all
    ranks, or None on all.
    Returns:
        out [T, h, kv_lora_rank], or [T, h, V] with w_uv, and lse [T, h] float32: this rank's heads over all ranks'
        tokens.
    """
    if not q_is_replicated:
        q = exchange.gather_heads(q)
    what = q, kv_cache, decode.block_table, decode.local_seq_lens, scale, kv_lora_rank
    if w_uv is None and decode.query_start_loc is None and decode.max_query_len == 1:
        mailbox = exchange.mailbox(q.shape[0], q.shape[1], kv_lora_rank, dtype or q.dtype)
        if mailbox is not None:
            _check(*what, None, 1, decode.workspace)
            dtype = _check_dtypes(q, kv_cache, kv_scale, q_scale, dtype)
            return torch.ops.dcpmla.mla_decode_and_merge(*what, decode.workspace, kv_scale, q_scale, dtype, *mailbox)
    out, lse = mla_decode(
        *what,
        query_start_loc=decode.query_start_loc,
        max_query_len=decode.max_query_len,
        workspace=decode.workspace,
        kv_scale=kv_scale,
        q_scale=q_scale,
        dtype=dtype,
    )
    if w_uv is not None:
        out = project_values(out, w_uv).unflatten(1, w_uv.shape[:2])
    return exchange.combine(out, lse)


@torch.library.custom_op("dcpmla::mla_decode", mutates_args=("workspace",))
def _mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int,
    query_start_loc: Tensor | None,
    max_query_len: int,
    workspace: Tensor | None,
    kv_scale: Tensor | None,
    q_scale: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    kernel = select_decode(q, kv_cache, kv_lora_rank, dtype).load()
    what = q, kv_cache, block_table, seq_lens, scale, kv_lora_rank
    return kernel(*what, query_start_loc, max_query_len, workspace, kv_scale, q_scale, dtype)


@_mla_decode.register_fake
def _(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int,
    query_start_loc: Tensor | None,
    max_query_len: int,
    workspace: Tensor | None,
    kv_scale: Tensor | None,
    q_scale: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], kv_lora_rank, dtype=dtype), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("dcpmla::mla_decode_and_merge", mutates_args=("workspace", "state"))
def _mla_decode_and_merge(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int,
    workspace: Tensor | None,
    kv_scale: Tensor | None,
    q_scale: Tensor | None,
    dtype: torch.dtype,
    addresses: Tensor,
    state: Tensor,
    fault: Tensor,
    landing_bytes: int,
    timeout: float,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Decode of one token a request and `combine`.

    A kernel that can stores rows at their owners: they are on their way under attention.
    """
    from dcpmla.comm import direct_ops  # triton is there on Linux only

    mailbox = addresses, state, fault, landing_bytes, timeout, group
    backend = select_decode(q, kv_cache, kv_lora_rank, dtype)
    if backend.load_sender is None:
        what = q, kv_cache, block_table, seq_lens, scale, kv_lora_rank
        out, lse = backend.load()(*what, None, 1, workspace, kv_scale, q_scale, dtype)
        return direct_ops.combine(out, lse, *mailbox, is_fp8=False)
    merged = q.new_empty(q.shape[0], q.shape[1] // len(addresses), kv_lora_rank, dtype=dtype)
    merged_lse = q.new_empty(merged.shape[:2], dtype=torch.float32)
    rank = direct_ops.enter("out", merged, fault, timeout, group)
    if len(q):
        scales = kv_scale, q_scale, dtype
        backend.load_sender()(
            q, kv_cache, block_table, seq_lens, scale, workspace, *scales, addresses, state, rank, landing_bytes
        )
        direct_ops.collect(merged, merged_lse, *mailbox)
    return merged, merged_lse


@_mla_decode_and_merge.register_fake
def _(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int,
    workspace: Tensor | None,
    kv_scale: Tensor | None,
    q_scale: Tensor | None,
    dtype: torch.dtype,
    addresses: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor]:
    shape = q.shape[0], q.shape[1] // addresses.shape[0]
    return q.new_empty(*shape, kv_lora_rank, dtype=dtype), q.new_empty(shape, dtype=torch.float32)


def _uniform_query_len(num_tokens: int, num_reqs: int, max_query_len: int | None) -> int:
    query_len = num_tokens // num_reqs if num_reqs else 0
    if query_len * num_reqs != num_tokens:
        raise ValueError(f"q has {num_tokens} tokens for {num_reqs} requests; without query_start_loc each has as many")
    if max_query_len is not None and max_query_len != query_len:
        raise ValueError(
            f"max_query_len is {max_query_len}; without query_start_loc it is {num_tokens} / {num_reqs} = {query_len}"
        )
    return query_len
