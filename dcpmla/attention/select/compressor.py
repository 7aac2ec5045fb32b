"""The compressor: an entry for each `ratio` tokens, pooled column by column with a softmax over their gates.

An entry represents the tokens of its span. If entries overlap, each also pools the span before its own: a token has two
pairs of value and gate, one for the next span's entry and one for its own. A span may take any number of steps: sums
keep an unfinished entry, for each column the peak of the gates, the sum of their exponentials, and the sum of the
exponentials times the values.

Custom ops (`torch.ops.dcpmla`). The torch code here specifies them and runs on CPUs; GPUs run the kernels of
`attention/select/kernels/compressor.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dcpmla.attention.projections import apply_rope
from dcpmla.attention.select.entries import Pooling, PoolUpdate
from dcpmla.attention.select.projections import hadamard_matrix
from dcpmla.cache.index_keys import write_index_keys
from dcpmla.cache.shared_rows import write_rows
from dcpmla.operators import nothing, operator


class _Sums(NamedTuple):
    """Sums of entries [N, D]: the gates' peak (-inf without tokens), their exponentials, exponentials times values."""

    peak: Tensor
    total: Tensor
    values: Tensor


@operator(
    "compress_",
    kernel="dcpmla.attention.select.kernels.compressor:compress_",
    fake=nothing,
    mutates_args=("sums", "cache", "latents", "slots"),
)
def compress_(call: Pooling, part: PoolUpdate) -> None:
    """Pool a part of a step's tokens into entries, and write this rank's complete entries into a cache.

    Source: DeepSeek-V4's report, equations 9-12 and 20-23; transformers' GLM-5-Next.
    """
    pairs, bias, norm_weight, eps, sums, cache, layout, is_index, hadamard, latents, slots = call
    ratio, width = bias.shape[0], sums.shape[-1]
    positions, request, first_position, end, _, target = part
    is_first = (positions % ratio == 0) | (positions == first_position[request])
    is_in_part = (positions >= first_position[request]) & (positions < end[request]) & (target[request] >= 0)
    token = (is_first & is_in_part).nonzero().flatten()  # the first token of each span
    entries, is_complete = _pool(pairs, bias, sums, part, token)
    token, entries = token[is_complete], entries[is_complete]
    if norm_weight is not None:
        entries = entries * torch.rsqrt(entries.square().mean(-1, keepdim=True) + eps) * norm_weight
    entries = entries.to(pairs.dtype)
    unrotated = entries.clone()
    cos_sin, block_table, entries_per_block, owner = layout
    if cos_sin is not None:
        rotated = slice(0, cos_sin.shape[1]) if is_index else slice(width - cos_sin.shape[1], width)
        entries[:, rotated] = apply_rope(entries[:, rotated], cos_sin[token], True)
    index, rows = positions[token] // ratio, block_table[request[token].long()]
    row_slots = owner.slot_mapping(index, rows, entries_per_block)
    if not is_index:
        write_rows(cache, entries, row_slots)
        if latents is not None and slots is not None:
            is_mine = row_slots >= 0
            latents[token[is_mine]], slots[token[is_mine]] = unrotated[is_mine], row_slots[is_mine]
        return
    if hadamard:
        entries = (entries.float() @ hadamard_matrix(width, torch.float32, entries.device)).to(entries.dtype)
    write_index_keys(cache, entries, row_slots)


def _pool(pairs: Tensor, bias: Tensor, sums: Tensor, part: PoolUpdate, token: Tensor) -> tuple[Tensor, Tensor]:
    """Pool the spans whose first tokens in the step are `token` [N], and store the sums of each request's last span.

    Returns:
        Entries [N, D] float32, and whether each is complete [N] bool.
    """
    ratio, (_, num_halves, _, width) = bias.shape[0], sums.shape
    position, of_token = part.positions[token], part.request[token].long()
    start, end, state = (column[of_token] for column in (part.first_position, part.end, part.source.long()))
    order = position // ratio - start // ratio  # index of the span in its request's part of the step
    place = position % ratio
    num = torch.minimum(ratio - place, end - position)
    halves = _halves(pairs, bias, num_halves, width)
    own = _sum_tokens(*halves[-1], bias[:, -width:], token, place, num)
    carried = [_carried(sums, state, half, (order == 0) & (start > 0)) for half in range(num_halves)]
    entry = _merge(carried[0], own)
    following = None
    if num_halves == 2:
        num_before = torch.minimum(torch.where(order > 0, position - start, 0), torch.tensor(ratio))
        before = _sum_tokens(*halves[0], bias[:, :width], token - num_before, ratio - num_before, num_before)
        # The previous span was in progress when the step began: the next entry's sums hold its tokens before the step.
        unfinished = _carried(sums, state, 1, (order == 1) & (start % ratio > 0))
        entry = _merge(_merge(entry, before), unfinished)
        following = _merge(carried[1], _sum_tokens(*halves[0], bias[:, :width], token, place, num))
    is_complete = position - place + ratio <= end
    is_last = position // ratio == (end - 1) // ratio
    empty = _carried(sums, state, 0, torch.zeros_like(is_last))
    left = [_choose(is_complete, empty if following is None else following, entry)]
    if following is not None:
        left.append(_choose(is_complete, empty, following))
    sums[part.target[of_token].long()[is_last]] = torch.stack([torch.stack(half, 1) for half in left], 1)[is_last]
    return entry.values / entry.total, is_complete


def _halves(pairs: Tensor, bias: Tensor, num_halves: int, width: int) -> list[tuple[Tensor, Tensor]]:
    """Return values and gates [T, D] of each half."""
    values, *gates_after = pairs.float().split(num_halves * width, -1)
    gates = gates_after[0] if gates_after else values  # one token has all weight, whatever its gate
    return list(zip(values.split(width, -1), gates.split(width, -1), strict=True))


def _sum_tokens(values: Tensor, gates: Tensor, bias: Tensor, first: Tensor, place: Tensor, num: Tensor) -> _Sums:
    """Sum `num` [N] tokens from `first` [N] on, at positions in their span from `place` [N] on."""
    ratio = bias.shape[0]
    index = torch.arange(ratio, device=first.device)
    is_there = (index < num[:, None])[..., None]
    rows = (first[:, None] + index).clamp(0, len(values) - 1)
    gate = (gates[rows] + bias[(place[:, None] + index) % ratio]).masked_fill(~is_there, -torch.inf)
    peak = gate.amax(1)
    weights = torch.exp(gate - peak.where(peak > -torch.inf, 0.0)[:, None])
    return _Sums(peak, weights.sum(1), (weights * values[rows].masked_fill(~is_there, 0.0)).sum(1))


def _carried(sums: Tensor, state: Tensor, half: int, is_there: Tensor) -> _Sums:
    """Return the sums [N, D] from before the step; empty sums where is_there is false."""
    peak, total, values = sums[state, half].unbind(1)
    mask = is_there[:, None]
    return _Sums(peak.where(mask, -torch.inf), total.where(mask, 0.0), values.where(mask, 0.0))


def _merge(a: _Sums, b: _Sums) -> _Sums:
    """Add two sums of the same entries."""
    peak = torch.maximum(a.peak, b.peak)
    shift = peak.where(peak > -torch.inf, 0.0)  # -inf - -inf is NaN
    of_a, of_b = torch.exp(a.peak - shift), torch.exp(b.peak - shift)
    return _Sums(peak, a.total * of_a + b.total * of_b, a.values * of_a + b.values * of_b)


def _choose(condition: Tensor, a: _Sums, b: _Sums) -> _Sums:
    """Return a where the condition [N] holds, else b."""
    return _Sums(*(torch.where(condition[:, None], x, y) for x, y in zip(a, b, strict=True)))
