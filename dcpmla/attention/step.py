"""What one step attends to: built once a step from numbers the host knows, then passed by hand to every layer.

A batch is flat: the tokens of decodes first (one each, or a few where tokens are speculated), then those of
prefills. Everything that picks a collective or its size comes from global lengths, so all ranks of a DCP group build
the same sequence of exchanges.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dcpmla import ownership
from dcpmla.attention.calls import decode_workspace
from dcpmla.attention.sparse.metadata import SparseMetadata
from dcpmla.comm.exchange import tokens_of_rows
from dcpmla.config import DCPConfig


@dataclass(frozen=True)
class DecodeMetadata:
    """Requests with few new tokens: one, or those that a draft speculated.

    Attributes:
        block_table: [num_decodes, max_blocks] int32.
        local_seq_lens: [num_decode_tokens] int32, for each new token how many of its request's tokens on this rank
            it sees: those at its position and before. The causal bound is global, so a rank may see no more at a
            request's next token.
        query_start_loc: [num_decodes + 1] int32, where each request's new tokens start; None when all have
        max_query_len.
        max_query_len: most new tokens of a request.
        workspace: of the kernels that split a request over programs (`decode_workspace`); None where there is none.
    """

    block_table: Tensor
    local_seq_lens: Tensor
    query_start_loc: Tensor | None
    max_query_len: int
    workspace: Tensor | None


@dataclass(frozen=True)
class ContextChunk:
    """A piece of every prefill request's cached context, small enough for the workspace.

    Attributes:
        local_slots: [N] int64, this rank's cached tokens of the chunk, request after request, padded to the same N
        on all ranks.
        order: [S] int64, for each token of the chunk (request after request, in token order) its row in the
        gathered [W N] rows.
        tokens: [N] int64, for each of this rank's rows its token in [0, S), -1 for padding.
        key_start: [num_prefills + 1], where each request's tokens start in S.
        key_start_loc: [num_prefills + 1] int32, the same on the device.
        first_position: [num_prefills] int32, of each request's first token here; of a request without any, where
            its context ends.
    """

    local_slots: Tensor
    order: Tensor
    tokens: Tensor
    key_start: tuple[int, ...]
    key_start_loc: Tensor
    first_position: Tensor


@dataclass(frozen=True)
class PrefillMetadata:
    """Requests with many new tokens.

    Attributes:
        query_start: [num_prefills + 1], where each request's new tokens start, counted from the first prefill token.
        query_start_loc: [num_prefills + 1] int32, the same on the device.
        first_position: [num_prefills] int32, of each request's first new token.
        context_chunks: what was cached before this step; empty when nothing was.
        num_pairs: of a new token and a token at its position or before.
    """

    query_start: tuple[int, ...]
    query_start_loc: Tensor
    first_position: Tensor
    context_chunks: tuple[ContextChunk, ...]
    num_pairs: int


@dataclass(frozen=True)
class StepMetadata:
    """One step's batch. Rows past num_tokens in a layer's input are padding.

    Attributes:
        num_tokens, num_decode_tokens: real tokens, and how many of them (the first) are decodes.
        positions: [num_tokens] int64 in each token's sequence.
        slot_mapping: [num_tokens] int64 cache slots, -1 where another rank owns the token.
        decode, prefill: None when the batch has none.
        sparse: for layers with an indexer; None for dense models.
    """

    num_tokens: int
    num_decode_tokens: int
    positions: Tensor
    slot_mapping: Tensor
    decode: DecodeMetadata | None
    prefill: PrefillMetadata | None
    sparse: SparseMetadata | None = None

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        dcp: DCPConfig,
        dcp_rank: int,
        device: torch.device | str = "cpu",
        max_decode_query_len: int = 1,
        workspace: Tensor | None = None,
        is_sparse: bool = False,
    ) -> "StepMetadata":
        """Lay out a step.

        Args:
            query_lens: [num_reqs] new tokens of each request; requests at the front with at most
                max_decode_query_len are decodes, all others prefills.
            seq_lens: [num_reqs] tokens of each request after this step.
            block_tables: [num_reqs] block ids of each request, enough for seq_lens.
            workspace: from `decode_workspace`, shared by steps that follow each other on one stream; None makes one
            for this step.
            is_sparse: for layers with an indexer.
        Raises:
            ValueError: lengths that do not belong together, a block table too short, more prefills than the
                workspace has room for.
        """
        _check_lengths(query_lens, seq_lens, block_tables, dcp)
        num_decodes = next((i for i, length in enumerate(query_lens) if length > max_decode_query_len), len(query_lens))
        positions = np.concatenate(
            [np.arange(seq - query, seq) for query, seq in zip(query_lens, seq_lens, strict=True)]
        )
        table = _pad_table(block_tables, seq_lens, dcp)
        # Each token's block alone, and its place in it: whole rows of the table would be [T, max_blocks].
        blocks = table[np.repeat(np.arange(len(query_lens)), query_lens), positions // dcp.virtual_block_size]
        places = torch.from_numpy(positions % dcp.virtual_block_size)
        slots = ownership.slot_mapping(places, torch.from_numpy(blocks)[:, None], dcp_rank=dcp_rank, **_layout(dcp))
        decodes, prefills = slice(num_decodes), slice(num_decodes, None)
        num_decode_tokens = sum(query_lens[decodes])
        return cls(
            num_tokens=len(positions),
            num_decode_tokens=num_decode_tokens,
            positions=_to(device, positions),
            slot_mapping=_to(device, slots),
            decode=_build_decode(
                query_lens[decodes], positions[:num_decode_tokens], table[decodes], dcp, dcp_rank, device, workspace
            )
            if num_decodes
            else None,
            prefill=_build_prefill(query_lens[prefills], seq_lens[prefills], table[prefills], dcp, dcp_rank, device)
            if num_decodes < len(query_lens)
            else None,
            sparse=_build_sparse(query_lens, positions, table, dcp, dcp_rank, device) if is_sparse else None,
        )


def context_workspace_tokens(max_model_len: int, max_num_seqs: int, dcp: DCPConfig) -> int:
    """Cached tokens to gather and up-project at a time: at least one aligned chunk of every request, and at most
    64k tokens beyond that.

    Source: vLLM's chunked-prefill workspace for MLA.
    """
    page = dcp.chunk_alignment
    return max(min(max(8 * max_model_len, 4 * max_num_seqs * page), 65536), max_num_seqs * page)


def _build_decode(
    query_lens: Sequence[int],
    positions: np.ndarray,
    table: np.ndarray,
    dcp: DCPConfig,
    dcp_rank: int,
    device: torch.device | str,
    workspace: Tensor | None,
) -> DecodeMetadata:
    size, interleave = dcp.decode_context_parallel_size, dcp.cp_kv_cache_interleave_size
    lens = ownership.local_seq_lens(torch.from_numpy(positions + 1), size, dcp_rank, interleave)
    num_columns = -(-int(positions.max() + 1) // dcp.virtual_block_size)
    is_uniform = min(query_lens) == max(query_lens)
    return DecodeMetadata(
        block_table=_to(device, table[:, :num_columns].astype(np.int32)),
        local_seq_lens=_to(device, lens.to(torch.int32)),
        query_start_loc=None if is_uniform else _to(device, np.asarray(_starts(query_lens), dtype=np.int32)),
        max_query_len=max(query_lens),
        workspace=decode_workspace(device) if workspace is None else workspace,
    )


def _build_sparse(
    query_lens: Sequence[int],
    positions: np.ndarray,
    table: np.ndarray,
    dcp: DCPConfig,
    dcp_rank: int,
    device: torch.device | str,
) -> SparseMetadata:
    size, interleave = dcp.decode_context_parallel_size, dcp.cp_kv_cache_interleave_size
    seq_lens = torch.from_numpy(positions + 1)
    return SparseMetadata(
        block_table=_to(device, table.astype(np.int32)),
        request=_to(device, np.repeat(np.arange(len(query_lens), dtype=np.int32), query_lens)),
        seq_lens=_to(device, seq_lens.to(torch.int32)),
        local_seq_lens=_to(device, ownership.local_seq_lens(seq_lens, size, dcp_rank, interleave).to(torch.int32)),
        max_seq_len=int(positions.max()) + 1,
    )


def _build_prefill(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    table: np.ndarray,
    dcp: DCPConfig,
    dcp_rank: int,
    device: torch.device | str,
) -> PrefillMetadata:
    context_lens = np.asarray(seq_lens) - np.asarray(query_lens)
    chunk = _chunk_tokens(int((context_lens > 0).sum()), dcp)
    chunks = [
        _build_chunk(
            np.minimum(context_lens, start), np.minimum(context_lens, start + chunk), table, dcp, dcp_rank, device
        )
        for start in range(0, int(context_lens.max()), chunk)
    ]
    new = np.asarray(query_lens)
    num_pairs = int((new * context_lens + new * (new + 1) // 2).sum())
    first_position = _to(device, context_lens.astype(np.int32))
    return PrefillMetadata(*_start_both(query_lens, device), first_position, tuple(chunks), num_pairs)


def _chunk_tokens(num_contexts: int, dcp: DCPConfig) -> int:
    """Tokens of one request's context in a chunk: an equal share of the workspace, aligned."""
    share = dcp.context_workspace_tokens // max(1, num_contexts) // dcp.chunk_alignment * dcp.chunk_alignment
    if share == 0:
        raise ValueError(
            f"context_workspace_tokens is {dcp.context_workspace_tokens}; {num_contexts} prefills with context need at least "
            f"{num_contexts * dcp.chunk_alignment} ({dcp.chunk_alignment} each)"
        )
    return share


def _build_chunk(
    begin: np.ndarray, end: np.ndarray, table: np.ndarray, dcp: DCPConfig, dcp_rank: int, device: torch.device | str
) -> ContextChunk:
    """The chunk of positions [begin[i], end[i]) of each request i; every non-empty begin is aligned."""
    size, interleave = dcp.decode_context_parallel_size, dcp.cp_kv_cache_interleave_size
    lens = end - begin
    # Rank 0 owns the first group of an aligned chunk, so no rank has more of it than rank 0: all ranks pad to that.
    padded_lens = -(-lens // (size * interleave)) * interleave
    padded_start = np.asarray(_starts(padded_lens))
    local_slots, orders = [], []
    for request, length in enumerate(lens):
        position = np.arange(begin[request], end[request])
        first = begin[request] // size
        owner = ownership.owner_rank(torch.from_numpy(position), size, interleave).numpy()
        index = ownership.local_index(torch.from_numpy(position), size, interleave).numpy() - first
        orders.append(owner * padded_start[-1] + padded_start[request] + index)
        # Padding reads whatever lies behind the last token in its block; `order` never points at it.
        local = first + np.arange(padded_lens[request] if length else 0)
        local_slots.append(table[request, local // dcp.block_size] * dcp.block_size + local % dcp.block_size)
    order = torch.from_numpy(np.concatenate(orders))
    tokens = tokens_of_rows(order, int(padded_start[-1]), dcp_rank)
    slots = np.concatenate(local_slots)
    first_position = _to(device, begin.astype(np.int32))
    return ContextChunk(
        _to(device, slots), _to(device, order), _to(device, tokens), *_start_both(lens, device), first_position
    )


def _starts(lens: Sequence[int] | np.ndarray) -> tuple[int, ...]:
    """Lengths -> where each starts, and the total."""
    return (0, *np.cumsum(lens).tolist())


def _start_both(lens: Sequence[int] | np.ndarray, device: torch.device | str) -> tuple[tuple[int, ...], Tensor]:
    """`_starts` on the host, and on the device as int32."""
    start = _starts(lens)
    return start, _to(device, np.asarray(start, dtype=np.int32))


def _pad_table(block_tables: Sequence[Sequence[int]], seq_lens: Sequence[int], dcp: DCPConfig) -> np.ndarray:
    """[num_reqs, max_blocks] int64; short rows are filled with block 0, which nothing reads."""
    table = np.zeros((len(block_tables), -(-max(seq_lens) // dcp.virtual_block_size)), dtype=np.int64)
    for row, blocks in zip(table, block_tables, strict=True):
        row[: len(blocks)] = blocks[: len(row)]
    return table


def _layout(dcp: DCPConfig) -> dict[str, int]:
    return {
        "block_size": dcp.block_size,
        "dcp_size": dcp.decode_context_parallel_size,
        "interleave": dcp.cp_kv_cache_interleave_size,
    }


def _to(device: torch.device | str, array: np.ndarray | Tensor) -> Tensor:
    tensor = torch.as_tensor(array)
    on_gpu = torch.device(device).type == "cuda"
    return tensor.pin_memory().to(device, non_blocking=True) if on_gpu else tensor.to(device)


def _check_lengths(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]], dcp: DCPConfig
) -> None:
    if not query_lens or not len(query_lens) == len(seq_lens) == len(block_tables):
        raise ValueError(
            f"query_lens, seq_lens and block_tables have {len(query_lens)}, {len(seq_lens)} and {len(block_tables)} requests; "
            f"they must have the same number, at least 1"
        )
    for request, (query, seq, blocks) in enumerate(zip(query_lens, seq_lens, block_tables, strict=True)):
        if not 1 <= query <= seq:
            raise ValueError(
                f"request {request}: query_lens is {query} and seq_lens {seq}; 1 <= query_lens <= seq_lens must hold"
            )
        if len(blocks) * dcp.virtual_block_size < seq:
            raise ValueError(
                f"request {request}: block_tables has {len(blocks)} blocks, room for {len(blocks) * dcp.virtual_block_size} tokens; "
                f"seq_lens is {seq}"
            )
