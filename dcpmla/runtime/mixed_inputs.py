"""The static memory that captured mixed steps read (`MixedInputs`)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.build import GraphRows, StepBuilder
from dcpmla.attention.calls import Segments, decode_workspace
from dcpmla.attention.chunks import starts_of
from dcpmla.attention.pieces import PieceColumns, cut_starts, piece_columns
from dcpmla.attention.step import Cut, DecodeMetadata, PrefillMetadata, StepMetadata, StepRequests
from dcpmla.runtime.mixed_sizes import DECODE_TOKENS, MixedLimits, MixedSize, max_prompts
from dcpmla.upload import upload


class MixedInputs:
    """A mixed step of one of several sizes, in memory that never moves.

    A token of padding has token 0 at position 0: its latent is not written, and it attends to no token.

    Args:
        steps: Builder of steps over the cache.
        num_blocks: Number of blocks of the cache.
        device: Device of the memory.
    """

    def __init__(self, limits: MixedLimits, steps: StepBuilder, num_blocks: int, device: torch.device) -> None:
        self._limits, self._steps, self._num_blocks, self._device = limits, steps, num_blocks, device
        self._num_decode_tokens = min(DECODE_TOKENS, limits.num_absorbed_tokens) if steps.has_static_decodes else 0
        self._token_ids = torch.zeros(limits.num_tokens, dtype=torch.int64, device=device)
        self._workspace = decode_workspace(device)

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        numbers = steps.mixed_numbers(_padding(limits.num_tokens), limits.num_reqs, limits.num_tokens)
        self._numbers = new(len(numbers))
        absorbed = limits.num_absorbed_tokens
        self._columns = PieceColumns(
            positions=new(limits.num_tokens, dtype=torch.int64),
            slot_mapping=new(limits.num_tokens, dtype=torch.int64),
            local_seq_lens=new(absorbed),
            seq_lens=new(absorbed),
            request=new(absorbed),
            start_loc=new(limits.num_segments + 1),
            request_index=new(limits.num_segments),
            block_table=new(limits.num_reqs, limits.num_blocks),
        )
        self._prompt_starts = new(1 + max_prompts(limits.num_tokens))
        self._prompt_positions = new(max_prompts(limits.num_tokens))

    def clear(self, size: MixedSize) -> None:
        """Make all tokens of a size padding."""
        self._token_ids.zero_()
        for column in self._columns:
            column.zero_()
        self._columns.slot_mapping.fill_(-1)
        self._prompt_starts.zero_()
        self._set_numbers(size, _padding(size.num_tokens))

    def fill_whole(self, size: MixedSize, token_ids: Tensor, requests: StepRequests, num_absorbed: int) -> None:
        """Copy a step of one graph.

        Args:
            token_ids: Tokens of the step [n], int64, on the device or the CPU.
            requests: Requests of the step.
            num_absorbed: Number of requests that attend with absorbed queries, the first ones; the graph must be able
                to hold the others (`takes`).
        Raises:
            ValueError: The requests are invalid, have more tokens than the size, or blocks that the cache lacks.
        """
        limits = self._limits
        shape = size.num_tokens, self._room(size), limits.num_segments
        columns = piece_columns(self._steps, requests, num_absorbed, limits.tokens_per_request, *shape)
        block = columns.block_table.max()
        if block >= self._num_blocks:
            raise ValueError(
                f"block_tables has block {block}; the cache has {self._num_blocks} blocks, numbered from 0"
            )
        self._copy(columns._asdict())
        self._set_tokens(size, token_ids)
        if limits.has_prompts:
            starts = starts_of(requests.query_lens)[num_absorbed:]
            num_missing = len(self._prompt_starts) - len(starts)
            padded = np.pad(np.asarray(starts, dtype=np.int32), (0, num_missing), mode="edge")
            self._prompt_starts.copy_(upload([padded], self._device)[0])

    def takes(self, size: MixedSize, num_absorbed_tokens: int, contexts: Sequence[int]) -> bool:
        """Return whether one graph can hold a step.

        Args:
            num_absorbed_tokens: Number of tokens that attend with absorbed queries.
            contexts: Number of cached tokens of each request that attends by MHA.
        """
        if num_absorbed_tokens > self._room(size):
            return False
        fits = len(contexts) <= max_prompts(size.num_tokens)
        return not contexts or (self._limits.has_prompts and fits and not any(contexts))

    def fill(
        self, size: MixedSize, token_ids: Tensor, step: StepMetadata, requests: StepRequests, num_absorbed: int
    ) -> bool:
        """Copy a step with MHA; return whether its decodes attend inside the graphs.

        Args:
            token_ids: Tokens of the step [n], int64 on the device.
            step: Metadata of the step.
            requests: Requests of the step.
            num_absorbed: Number of requests that attend with absorbed queries, the first ones.
        Raises:
            ValueError: The step has blocks that the cache lacks.
        """
        step.check_blocks(self._num_blocks)  # layers check only the step that is captured
        columns, num_tokens = self._columns, step.num_tokens
        columns.positions[:num_tokens].copy_(step.positions)
        columns.positions[num_tokens : size.num_tokens].zero_()
        columns.slot_mapping[:num_tokens].copy_(step.slot_mapping)
        columns.slot_mapping[num_tokens : size.num_tokens].fill_(-1)
        self._set_tokens(size, token_ids)
        self._set_numbers(size, requests)
        return self._fill_decodes(self._room(size), requests.first(num_absorbed))

    def step(self, size: MixedSize, cut: Cut | None = None) -> StepMetadata:
        """Return the metadata of a size, in static memory."""
        columns, num_tokens = self._columns, size.num_tokens
        absorbed, prefill = self._room(size), None
        if size.is_whole and self._limits.has_prompts:
            num_prompts = max_prompts(num_tokens)
            starts = Segments((), self._prompt_starts[: num_prompts + 1])
            prefill = PrefillMetadata(starts, self._prompt_positions[:num_prompts], ())
        step = StepMetadata(
            num_tokens=num_tokens,
            num_decode_tokens=absorbed,
            num_blocks=0,  # checked for each step
            positions=columns.positions[:num_tokens],
            slot_mapping=columns.slot_mapping[:num_tokens],
            decode=self._decode(absorbed) if absorbed else None,
            prefill=prefill,
            cut=None if size.is_whole else cut,
        )
        if not size.is_whole:
            return self._steps.extend_mixed(step, self._numbers, self._limits.num_reqs)
        rows = GraphRows(
            query_len=0,
            max_seq_len=self._limits.max_model_len,
            block_table=columns.block_table,
            states=columns.request[:0],
            request=columns.request[:num_tokens],
            positions=columns.positions[:num_tokens],
            seq_lens=columns.seq_lens[:num_tokens],
            local_seq_lens=columns.local_seq_lens[:num_tokens],
        )
        return self._steps.extend_graph(step, rows)

    def token_ids(self, size: MixedSize) -> Tensor:
        """Return the tokens [num_tokens] of a size, int64."""
        return self._token_ids[: size.num_tokens]

    def _room(self, size: MixedSize) -> int:
        """Return the number of a size's first tokens that can attend with absorbed queries inside its graphs."""
        limit = self._limits.num_absorbed_tokens if size.is_whole else self._num_decode_tokens
        return min(limit, size.num_tokens)

    def _fill_decodes(self, room: int, requests: StepRequests) -> bool:
        limits, num_tokens = self._limits, sum(requests.query_lens)
        if 0 < num_tokens <= room:
            widths = limits.tokens_per_request, room, room, limits.num_segments
            columns = piece_columns(self._steps, requests, len(requests.query_lens), *widths)
            names = ("local_seq_lens", "start_loc", "request_index", "block_table")
            self._copy({name: getattr(columns, name) for name in names})
            return True
        if room:
            lens = np.zeros(0, dtype=np.int64)
            start_loc, _ = cut_starts(lens, limits.tokens_per_request, room, limits.num_segments)
            self._copy({"local_seq_lens": np.zeros(room, dtype=np.int32), "start_loc": start_loc})
        return num_tokens == 0

    def _copy(self, columns: dict[str, Any]) -> None:
        """Copy columns to the front of the static ones, in one transfer."""
        for name, column in zip(columns, upload(list(columns.values()), self._device), strict=True):
            getattr(self._columns, name)[tuple(map(slice, column.shape))].copy_(column)

    def _set_tokens(self, size: MixedSize, token_ids: Tensor) -> None:
        if token_ids.is_cpu:  # a copy of memory that is not pinned would wait for the step before
            (token_ids,) = upload([token_ids.numpy()], self._device)
        self._token_ids[: len(token_ids)].copy_(token_ids)
        self._token_ids[len(token_ids) : size.num_tokens].zero_()

    def _set_numbers(self, size: MixedSize, requests: StepRequests) -> None:
        """Copy the numbers that layers of the steps' kind read."""
        if len(self._numbers):
            numbers = self._steps.mixed_numbers(requests, self._limits.num_reqs, size.num_tokens)
            self._numbers[: len(numbers)].copy_(upload([numbers], self._device)[0])

    def _decode(self, num_tokens: int) -> DecodeMetadata:
        columns = self._columns
        return DecodeMetadata(
            block_table=columns.block_table,
            local_seq_lens=columns.local_seq_lens[:num_tokens],
            queries=Segments((0, num_tokens), columns.start_loc),
            max_query_len=self._limits.tokens_per_request,
            workspace=self._workspace,
            request_index=columns.request_index,
        )


def _padding(num_tokens: int) -> StepRequests:
    """Return one request of padding with all tokens: a prompt of as many tokens takes kernels as long."""
    return StepRequests([num_tokens], [num_tokens], [()], [-1])
