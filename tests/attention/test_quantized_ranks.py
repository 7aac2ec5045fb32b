"""Decodes and prefills over caches of 8 bits dealt to ranks in one process, against float64 on dequantized rows."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from dcpmla import StepMetadata, dcp_mla_prefill, merge_partials
from dcpmla.attention.mla.prefill import read_cache_rows
from dcpmla.attention.step.chunks import PrefillMetadata
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.cache.formats import FP8, row_width, storage_dtype, to_cache_rows, to_fp8, to_latents
from dcpmla.cache.latent import num_blocks
from dcpmla.comm.exchange import LocalExchange
from dcpmla.integrations.families.table import attention_of
from tests.attention.test_quantized_cache import FORMATS, KV_SCALE, Q_SCALE, L, R, config_of_layer, layout, over_latents
from tests.support.backends import decode, up
from tests.test_ownership import deal_slots


class AllRanks(LocalExchange):
    """The exchange of a group whose ranks are all here: it gathers context from everybody's cache, chunk by chunk."""

    def __init__(self, caches: Sequence[Tensor], steps: Sequence[StepMetadata]) -> None:
        self.caches, self.chunks = (
            caches,
            zip(*(step.prefill.context_chunks for step in steps if step.prefill), strict=True),
        )

    def start_context(self, rows: Tensor, order: Tensor, tokens: Tensor) -> Callable[[], Tensor]:
        pieces = zip(self.caches, next(self.chunks), strict=True)
        everybody = torch.cat([read_cache_rows(cache, piece.local_slots).view(torch.uint8) for cache, piece in pieces])
        return lambda: everybody[order].view(rows.dtype)


@pytest.mark.parametrize("interleave", [1, 2, 16])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_ranks_in_one_process(size: int, interleave: int) -> None:
    """A decode and two prefills over a context that is dealt to simulated ranks."""
    config, query_lens, seq_lens, num_heads = attention_of(config_of_layer()).config, [1, 6, 3], [37, 75, 3], 2
    generator = torch.Generator().manual_seed(size)
    latents = [torch.randn(seq_len, L + R, generator=generator) for seq_len in seq_lens]
    w_uk, w_uv = (torch.randn(num_heads, width, L, generator=generator) for width in (8, 4))
    q = torch.randn(sum(query_lens), num_heads, 8 + R, generator=generator)
    absorbed = torch.cat([torch.einsum("thp,hpl->thl", q[..., :8], w_uk), q[..., 8:]], -1)
    for kv_format in FORMATS:
        dcp = layout(size, size, interleave, kv_format)
        storage = storage_dtype(dcp.kv_cache_dtype, torch.float32)
        kv_scale = torch.tensor([KV_SCALE]) if storage == FP8 else None
        q_scale = torch.tensor([Q_SCALE]) if kv_format[1] == "fp8" else None
        rows = [to_cache_rows(sequence[:, :L], sequence[:, L:], storage, kv_scale) for sequence in latents]
        free = iter(range(1000))
        tables = [[next(free) for _ in range(num_blocks(seq_len, dcp))] for seq_len in seq_lens]
        caches = [
            torch.full((next(free), dcp.block_size, row_width(storage, L, R)), 0xFF, dtype=torch.uint8)
            for _ in range(size)
        ]
        for sequence, table, seq_len, new in zip(rows, tables, seq_lens, (0, 6, 3), strict=True):
            places = deal_slots(seq_len - new, table, dcp.block_size, size, interleave)
            for row, (rank, slot) in zip(sequence.view(torch.uint8), places, strict=False):
                caches[rank].flatten(0, 1)[slot] = row
        caches = [cache.view(storage) for cache in caches]
        steps = [StepBuilder(dcp, rank).build(StepRequests(query_lens, seq_lens, tables)) for rank in range(size)]
        decoded = [to_latents(sequence, L, kv_scale, torch.float64) for sequence in rows]

        decode_q = absorbed[:1] if q_scale is None else to_fp8(absorbed[:1], q_scale)
        parts = [
            decode_on(step, decode_q, cache, config.softmax_scale, kv_scale, q_scale)
            for step, cache in zip(steps, caches, strict=True)
        ]
        outs, lses = zip(*parts, strict=True)
        out, _ = merge_partials(torch.stack(outs), torch.stack(lses))
        wanted_q = decode_q.double() * (1 if q_scale is None else q_scale)
        torch.testing.assert_close(out.double(), over_latents(wanted_q, decoded[0], config), atol=1e-5, rtol=1e-5)

        keys = [torch.cat([decoded[1][:-6], latents[1][-6:].double()]), latents[2].double()]
        attended = [
            over_latents(part.double(), key, config) for part, key in zip(absorbed[1:].split([6, 3]), keys, strict=True)
        ]
        wanted = torch.einsum("thl,hvl->thv", torch.cat(attended), w_uv.double())
        own, w_kv_b = torch.cat([latents[1][-6:], latents[2]]), torch.cat([w_uk, w_uv], 1)
        for rank in {0, size - 1}:
            what = (
                q[1:],
                own[:, :L],
                own[:, L:],
                caches[rank],
                up(w_kv_b),
                prefill_of(steps[rank]),
                config.softmax_scale,
                AllRanks(caches, steps),
            )
            out, _ = dcp_mla_prefill(*what, kv_scale)
            torch.testing.assert_close(out.double(), wanted, atol=1e-5 * float(wanted.abs().max()), rtol=1e-5)


def decode_on(
    step: StepMetadata, q: Tensor, cache: Tensor, scale: float, kv_scale: Tensor | None, q_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One rank's part of a decode."""
    assert step.decode is not None
    what = q, cache, step.decode.block_table, step.decode.local_seq_lens, scale, L
    return decode(*what, kv_scale=kv_scale, q_scale=q_scale, dtype=torch.float32)


def prefill_of(step: StepMetadata) -> PrefillMetadata:
    assert step.prefill is not None
    return step.prefill
