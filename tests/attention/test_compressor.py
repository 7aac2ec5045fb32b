"""The compressor: the torch code against sums in float64 over whole prompts."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcpmla import DCPConfig
from dcpmla.attention.layers.compressed.cache import plan_compressed
from dcpmla.attention.layers.compressed.config import LayerKind
from dcpmla.attention.layers.compressed.projections import rotate
from dcpmla.attention.select import compressor
from dcpmla.attention.select.entries import EntryLayout, Pooling
from tests.support.compressor_steps import build, config_of, decodes_first, tables_of
from tests.support.kernels import cut, randn

EPS = 1e-3


def pool(pairs: Tensor, bias: Tensor, norm: Tensor, num_halves: int, cos_sin: Tensor) -> Tensor:
    """Return the entries of a prompt [L, 2 A D] in float64, one after the other, column by column: no sums are kept."""
    ratio, width, rope = len(bias), len(norm), cos_sin.shape[1]
    pairs, bias = pairs.double(), bias.double()
    entries = []
    for number in range(len(pairs) // ratio):
        values, gates = [], []
        for half in range(num_halves):
            # The last half is the entry's own span, the first one of two the span before.
            first = (number - (num_halves - 1 - half)) * ratio
            columns = slice(half * width, (half + 1) * width)
            for token in range(max(0, first), first + ratio):
                values.append(pairs[token, columns])
                gates.append(pairs[token, num_halves * width :][columns] + bias[token - first, columns])
        entry = (torch.stack(gates).softmax(0) * torch.stack(values)).sum(0)
        entry = entry / (entry.square().mean() + EPS).sqrt() * norm.double()
        angles = cos_sin[number * ratio].double()
        for pair in range(rope // 2):
            at = width - rope + 2 * pair
            cos, sin = angles[pair], angles[rope // 2 + pair]
            first_one, second = entry[at].clone(), entry[at + 1].clone()
            entry[at], entry[at + 1] = first_one * cos - second * sin, second * cos + first_one * sin
        entries.append(entry)
    return torch.stack(entries) if entries else torch.empty(0, width, dtype=torch.float64)


@given(data=st.data())
def test_entries_are_those_of_whole_prompts(data: st.DataObject) -> None:
    """Any ratio, however prompts are cut into steps, whichever rank an entry is on, and whatever tokens of a step are
    rejected; nothing else is written. Entries before RoPE are the cached ones, not rotated yet.
    """
    ratio, num_halves = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 2))
    size, interleave = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    lens = data.draw(st.lists(st.tuples(*[st.integers(0, 11)] * 2).filter(any), min_size=1, max_size=7))
    num_drafts = data.draw(st.integers(0, 2))
    rejected = [tuple(data.draw(st.integers(0, max(0, min(new - 1, num_drafts)))) for new in each) for each in lens]
    rejected = [
        tuple(r if n <= 1 + num_drafts else 0 for n, r in zip(*both, strict=True))
        for both in zip(lens, rejected, strict=True)
    ]
    width, rope = 6, 4
    config = config_of(LayerKind(ratio, num_halves == 2), width, rope)
    layout = {"tensor_parallel_size": size, "decode_context_parallel_size": size}
    dcp = DCPConfig(**layout, cp_kv_cache_interleave_size=interleave, block_size=2 * interleave)
    totals = [
        sum(new) - sum(gone) for new, gone in zip(zip(*lens, strict=True), zip(*rejected, strict=True), strict=True)
    ]
    prompts = [cut(randn(total, 2 * num_halves * width, seed=i)) for i, total in enumerate(totals)]
    angles = randn(max(totals) + num_drafts, rope, seed=9)
    bias, norm = randn(ratio, num_halves * width, seed=7), randn(width, seed=8)
    longest = [total + num_drafts for total in totals]
    plan = plan_compressed(config, dcp, longest, torch.float32, 3, num_drafts)
    tables = tables_of(plan, longest)
    found: list[dict[int, Tensor]] = [{} for _ in totals]
    for rank in range(size):
        cache = torch.full(plan.rows_shape(ratio), torch.nan)
        shape = plan.sums(config.layer_kinds[0], width).shape[1:]
        sums = torch.full((plan.num_states * plan.num_copies, *shape), torch.nan)
        done, slots_before_rope = [0] * len(totals), set[int]()
        for new, gone in zip(lens, rejected, strict=True):
            step, parts = build(plan, rank, new, done, tables)
            kept = [a + b - c for a, b, c in zip(done, new, gone, strict=True)]
            wrong = randn(num_drafts, 2 * num_halves * width, seed=99)
            pairs = torch.cat(
                [rows for i in decodes_first(plan, new) for rows in (prompts[i][done[i] : kept[i]], wrong[: gone[i]])]
            )
            done = kept
            cos_sin = angles[step.positions // ratio * ratio]
            layout = EntryLayout(cos_sin, step.entry_table(ratio), plan.entries_per_block(ratio), step.owner)
            latents, slots = torch.full((len(pairs), width), 5.0), torch.full((len(pairs),), -1)
            for each in parts:
                call = Pooling(pairs, bias, norm, EPS, sums, cache, layout, False, False, latents, slots)
                compressor.compress_(call, each)
            is_written = slots >= 0
            torch.testing.assert_close(cache[slots[is_written], 0], rotate(latents, cos_sin)[is_written])
            assert (latents[~is_written] == 5).all()
            slots_before_rope |= set(slots[is_written].tolist())
        written = 0
        for i, table in enumerate(tables):
            for entry in range(totals[i] // ratio):
                if entry // interleave % size == rank:
                    local = entry // (size * interleave) * interleave + entry % interleave
                    block, offset = divmod(local, plan.entries_per_block(ratio))
                    row = plan.window_rows(ratio) + table[block] * plan.entries_per_block(ratio) + offset
                    found[i][entry] = cache[row, 0]
                    assert row in slots_before_rope
                    written += 1
        # Rejected tokens may have completed an entry more.
        assert written <= int((~cache.isnan()).any(-1).sum()) <= written + (len(totals) if num_drafts else 0)
    for i, prompt in enumerate(prompts):
        wanted = pool(prompt, bias, norm, num_halves, angles)
        assert sorted(found[i]) == list(range(len(wanted)))
        if len(wanted):
            got = torch.stack([found[i][entry] for entry in range(len(wanted))])
            torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)
