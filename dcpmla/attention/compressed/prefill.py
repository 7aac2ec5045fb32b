"""Prefill over windows and entries: each rank gathers all entries, and attends with its own heads alone."""

import torch
from torch import Tensor

from dcpmla.attention.calls import decode_workspace
from dcpmla.attention.compressed.config import LayerKind
from dcpmla.attention.compressed.step import CompressedMetadata, ContextRows
from dcpmla.attention.compressed.visible import append_rows
from dcpmla.attention.decode import mla_decode
from dcpmla.cache.shared_rows import read_rows
from dcpmla.comm.exchange import Exchange
from dcpmla.config import DCPConfig

_LISTED_ROWS = 1 << 22  # row numbers of a tile of tokens


def attend_prefill(
    q: Tensor,
    new_rows: Tensor,
    rows: Tensor,
    step: CompressedMetadata,
    kind: LayerKind,
    selected: Tensor | None,
    exchange: Exchange,
    dcp: DCPConfig,
) -> tuple[Tensor, Tensor]:
    """Attend from prefill tokens to their windows and to entries of all ranks. Collective.

    Args:
        q: [T, h, D] of this rank's heads.
        new_rows: [C + T, D], the windows' rows from earlier steps, then the new tokens'.
        rows: of this layer (`cache/shared_format.py`), this rank's entries of this step's tokens among them.
        selected: [T, topk] int32, entries that each token attends to, -1 after the last; None for all that it sees.
    Returns:
        out [T, h, D], lse [T, h] float32, without the sink.
    """
    context, width = step.context, q.shape[-1]
    assert context is not None
    gathered = new_rows
    if kind.ratio and len(context.entries[kind.ratio].order):
        chunk = context.entries[kind.ratio]
        mine = read_rows(rows, chunk.local_slots, width, q.dtype)
        gathered = torch.cat([new_rows, exchange.start_context(mine, chunk.order, chunk.tokens)()])
    num_tokens = len(q)
    first = len(step.positions) - num_tokens  # decodes come before
    visible = step.entries[kind.ratio].visible if kind.ratio else None
    counts = None if visible is None else visible.seq_lens[first:]
    most = step.plan.config.sliding_window + (0 if counts is None else step.max_entries(kind.ratio))
    tile = max(1, _LISTED_ROWS // most)
    workspace, parts = decode_workspace(q.device), []
    for start in range(0, num_tokens, tile):
        tokens = slice(start, min(start + tile, num_tokens))
        in_step = slice(first + tokens.start, first + tokens.stop)
        listed, num = _window(step, context, in_step, tokens)
        if counts is not None:
            base = context.entries[kind.ratio].keys.start_loc[step.request[in_step] - step.request[first]]
            some = None if selected is None else selected[tokens]
            entries, num_entries = _entries(counts[tokens], base + len(new_rows), some, step.max_entries(kind.ratio))
            listed, num = append_rows(listed, num, entries, num_entries)
        parts.append(
            mla_decode(
                q[tokens],
                gathered[:, None],
                listed,
                num,
                step.plan.config.scale,
                width,
                workspace=workspace,
                backend=dcp.attention_backend,
            )
        )
    out, lse = zip(*parts, strict=True)
    return torch.cat(out), torch.cat(lse)


def _window(step: CompressedMetadata, context: ContextRows, in_step: slice, tokens: slice) -> tuple[Tensor, Tensor]:
    """Return the gathered rows of the windows of some tokens, counted in the step and among its prefills: [n, window]
    int32, and how many they are [n].
    """
    positions, window = step.positions[in_step], step.plan.config.sliding_window
    num = (positions + 1).clamp(max=window).to(torch.int32)
    position = (positions + 1 - num)[:, None] + torch.arange(window, device=positions.device)
    first_row, first_position = context.first_row[tokens, None], context.first_position[tokens, None]
    is_new = position >= step.first_position[step.request[in_step]][:, None]
    rows = torch.where(is_new, context.new_row[tokens, None] + position, first_row + position - first_position)
    return rows.to(torch.int32), num


def _entries(counts: Tensor, base: Tensor, selected: Tensor | None, most: int) -> tuple[Tensor, Tensor]:
    """Return the gathered rows of the entries that tokens see, or that are selected for them: [n, N] int32, and how
    many [n].
    """
    if selected is not None:
        return base[:, None] + selected, counts.clamp(max=selected.shape[1])
    return base[:, None] + torch.arange(most, dtype=torch.int32, device=base.device), counts
