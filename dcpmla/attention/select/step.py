"""The part of a step that layers of sparse MLA read: the tokens that each token may select from, and its selection."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.attention.step.metadata import StepMetadata
from dcpmla.cache.layers import LayerCache


@dataclass(frozen=True)
class SparseMetadata:
    """The tokens that each token of a step, decodes and prefills alike, may select from.

    Attributes:
        block_table: Block ids of all requests of the step [num_reqs, max_blocks], int32.
        request: Request of each token [num_tokens], int32.
        seq_lens: Number of its request's tokens at each token's position and before [num_tokens], int32; 0 for padding.
        local_seq_lens: The same number over this rank's tokens [num_tokens], int32.
        max_seq_len: Upper bound of seq_lens, the same on all ranks; up to topk, nothing is selected.
        selection: Memory for the selection: a layer with an indexer writes it, later layers without one read it. None
            where no token has more than topk before it, and attention may read all latents.
    """

    block_table: Tensor
    request: Tensor
    seq_lens: Tensor
    local_seq_lens: Tensor
    max_seq_len: int
    selection: "SelectedTokens | None" = None

    def rows(self, tokens: slice) -> "SparseMetadata":
        """Return the metadata of some of the tokens."""
        per_token = self.request[tokens], self.seq_lens[tokens], self.local_seq_lens[tokens]
        return SparseMetadata(self.block_table, *per_token, self.max_seq_len)


class SelectedTokens(NamedTuple):
    """The tokens that each token of a step attends to: written by a layer with an indexer, read by it and by layers
    that reuse it.

    Attributes:
        positions: Positions in the request [T, topk], int32, unordered, -1 after the last; the same on all DCP ranks.
        slots: Cache slots of the selected tokens that this rank owns [T, N], int32; contiguous columns, undefined
            after the last.
        num_slots: Number of slots of each token [T], int32.
        num_first: Number of slots before the selected ones (rows of a window, in V4), included in num_slots [T], int32;
            None for none.
    """

    positions: Tensor
    slots: Tensor
    num_slots: Tensor
    num_first: Tensor | None = None

    @classmethod
    def empty(cls, num_tokens: int, topk: int, device: torch.device | str) -> "SelectedTokens":
        """Return uninitialized memory for num_tokens tokens."""
        positions, slots = (torch.empty(num_tokens, topk, dtype=torch.int32, device=device) for _ in range(2))
        return cls(positions, slots, torch.empty(num_tokens, dtype=torch.int32, device=device))

    def rows(self, tokens: slice) -> "SelectedTokens":
        """Return the selection of some of the tokens, in the same memory."""
        num_first = None if self.num_first is None else self.num_first[tokens]
        return SelectedTokens(self.positions[tokens], self.slots[tokens], self.num_slots[tokens], num_first)


def selectable(step: StepMetadata) -> SparseMetadata:
    """Return the tokens that each token of a step may select from, before a selection."""
    tokens = step.tokens
    return SparseMetadata(
        step.table.block_table, tokens.request, tokens.seq_lens, tokens.local_seq_lens, step.max_seq_len
    )


def with_selection(step: StepMetadata, topk: int, positions: Tensor | None = None) -> StepMetadata:
    """Return the step with the tokens that each token may select from, and where a token has more than topk before it,
    or latents are in host memory, with memory for topk selected tokens each.

    Args:
        positions: Memory of an engine for the selected positions [at least num_tokens, topk] int32, contiguous, whose
            first rows the layers write and read; None for new memory.
    Raises:
        ValueError: positions are not such a tensor.
    """
    if positions is not None:
        check_positions(positions, step, topk)
    if step.defer is not None:  # Selections are made between graphs, with the step of each replay.
        return step
    sparse = selectable(step)
    if sparse.max_seq_len <= topk and step.layout.dcp.kv_hot_tokens is None:
        return step.sharing(sparse)
    selection = SelectedTokens.empty(step.num_tokens, topk, sparse.request.device)
    if positions is not None:
        selection = selection._replace(positions=positions[: step.num_tokens])
    return step.sharing(replace(sparse, selection=selection))


def check_positions(positions: Tensor, step: StepMetadata, topk: int) -> None:
    """Raise ValueError unless positions are [at least the step's tokens, topk] int32 on its device, contiguous."""
    actual = positions.dtype, tuple(positions.shape), positions.device
    expected = torch.int32, (max(step.num_tokens, len(positions)), topk), step.tokens.positions.device
    if actual != expected or not positions.is_contiguous():
        needed = f"{expected} (dtype, shape, device), contiguous"
        raise ValueError(f"positions is {actual}, strides {positions.stride()}; expected {needed}")


def check_selection(topk: int, cache: LayerCache, step: StepMetadata) -> None:
    """Raise ValueError if the step or the cache does not fit a layer of sparse MLA."""
    sparse, kv_cache, num_hot = step.get(SparseMetadata), cache.latents, step.layout.dcp.kv_hot_tokens
    if (cache.hot is None) != (num_hot is None):
        found = "None" if cache.hot is None else "a HotSet"
        raise ValueError(
            f"kv_hot_tokens (--kv-hot-tokens) is {num_hot}, but cache.hot is {found}; plan the LatentCache with the "
            "same layout"
        )
    if sparse is None:
        raise ValueError(
            f"step has no sparse part, which a layer with config.indexer needs; call with_selection(step, {topk}) of "
            "dcpmla.attention.select.step"
        )
    if kv_cache.stride(0) != kv_cache.shape[1] * kv_cache.stride(1):
        raise ValueError(f"kv_cache has strides {kv_cache.stride()}; sparse attention takes contiguous blocks")
    if sparse.selection is None:
        if sparse.max_seq_len > topk:
            raise ValueError(
                f"the step has no selection; tokens with more than {topk} before them need "
                f"with_selection(step, {topk}) of dcpmla.attention.select.step"
            )
    elif tuple(sparse.selection.positions.shape) != (step.num_tokens, topk):
        raise ValueError(
            f"the step's selection is {tuple(sparse.selection.positions.shape)}; expected "
            f"{(step.num_tokens, topk)}, tokens and topk"
        )
