"""Prefill over selected positions, the whole path: against float64 over the selection."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dcpmla import DCPConfig, dcp_mla_prefill
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.comm.exchange import LocalExchange
from tests.attention.test_reference import SCALE, L, P, R, V
from tests.attention.test_selection_mask import select, seq_lens_of_tokens
from tests.support.backends import up
from tests.support.layouts import dcp_config
from tests.support.sharded_context import ShardedContext


@pytest.mark.parametrize(("size", "interleave", "block_size"), [(1, 1, 4), (2, 1, 4), (3, 2, 4), (4, 4, 4)])
def test_prefill_over_selected_positions(size: int, interleave: int, block_size: int) -> None:
    """Context in several chunks, of other lengths, or none; tokens that select all they have, one position, none of a
    segment.
    """
    query_lens, context_lens, topk = [5, 3, 34], [137, 0, 2], 9
    seq_lens = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
    dcp = dcp_config(size, size, interleave, block_size=block_size)
    workspace = -(-44 // dcp.chunk_alignment) * dcp.chunk_alignment  # shared by two requests
    positions = select(seq_lens_of_tokens(query_lens, seq_lens), topk)
    positions[0], positions[1] = torch.arange(topk) * 15, -1  # context alone, in all chunks; one position of it
    positions[1, topk // 2] = 70
    positions[2] = torch.tensor([139, 137, 138] + [-1] * (topk - 3))  # new tokens alone
    context = ShardedContext(replace(dcp, context_workspace_tokens=workspace), query_lens, context_lens)
    context.check(min_chunks=3, positions=positions)


def test_positions_of_other_tokens() -> None:
    prefill = StepBuilder(DCPConfig(block_size=4), 0).build(StepRequests([3], [3], [[0]])).prefill
    assert prefill is not None
    rows = (
        torch.zeros(3, 2, P + R),
        torch.zeros(3, L),
        torch.zeros(3, R),
        torch.zeros(1, 4, L + R),
        up(torch.zeros(2, P + V, L)),
    )
    with pytest.raises(ValueError, match="selected_positions has 4 rows; expected one for each of the 3 tokens of q"):
        dcp_mla_prefill(*rows, prefill, SCALE, LocalExchange(), selected_positions=select([1, 2, 3, 4], 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(128, 64, 128), (192, 64, 256)], ids=["DeepSeek-V3.2", "GLM-5"])
@pytest.mark.parametrize("workspace", [1024, 65536])
def test_dcp_mla_prefill_over_selected_positions_on_a_gpu(workspace: int, dims: tuple[int, int, int]) -> None:
    """In bfloat16, heads and top-k of real models, context in chunks or one, against the torch backend in float64."""
    nope, rope, v_head_dim = dims
    query_lens, seq_lens, num_heads, topk = [600, 7, 130], [4700, 7, 2200], 2, 2048
    dcp = DCPConfig(block_size=64, context_workspace_tokens=workspace)
    counts = [-(-length // 64) for length in seq_lens]
    tables = [list(range(sum(counts[:i]), sum(counts[: i + 1]))) for i in range(3)]
    generator = torch.Generator().manual_seed(0)
    positions = select(seq_lens_of_tokens(query_lens, seq_lens), topk).cuda()

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().cuda()

    num_tokens = sum(query_lens)
    latents = rows(num_tokens, 512), rows(num_tokens, rope), rows(sum(counts), 64, 512 + rope)
    inputs = rows(num_tokens, num_heads, nope + rope), *latents, rows(num_heads, nope + v_head_dim, 512) / 512**0.5
    prefill = StepBuilder(dcp, 0, "cuda").build(StepRequests(query_lens, seq_lens, tables)).prefill
    assert prefill is not None

    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        *cast, w_kv_b = (tensor.to(dtype) for tensor in inputs)
        out, lse = dcp_mla_prefill(
            *cast, up(w_kv_b), prefill, (nope + rope) ** -0.5, LocalExchange(), selected_positions=positions
        )
        return out.double(), lse

    (out, lse), (wanted, wanted_lse) = run(torch.bfloat16), run(torch.float64)
    assert (out - wanted).norm() < 1e-2 * wanted.norm()
    torch.testing.assert_close(lse, wanted_lse, atol=2e-2, rtol=2e-3)
