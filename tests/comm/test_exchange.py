"""The exchange compared with plain slicing and a float64 merge, in real groups of gloo ranks."""

import dataclasses
import itertools
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.comm.checked import CheckedExchange
from dcpmla.comm.exchange import Exchange
from dcpmla.comm.nccl import AllGatherReduceScatter, AllToAll
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from tests.support.direct_checks import tokens_of_rows
from tests.support.ranks import on_ranks, run_ranks

T, H, D = 5, 3, 40  # tokens, heads a rank, row width
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def partials(num_ranks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Draw all ranks' partial rows [W, T, W h, D] and LSE [W, T, W h]: some shards empty (NaN), token 1 on all."""
    generator = torch.Generator().manual_seed(num_ranks)
    out = torch.randn(num_ranks, T, num_ranks * H, D, generator=generator)
    lse = 10 * torch.randn(num_ranks, T, num_ranks * H, generator=generator)
    lse[torch.rand(num_ranks, T, generator=generator) < 0.3] = -torch.inf
    lse[:, 1] = -torch.inf
    out[lse == -torch.inf] = torch.nan
    return out.to(dtype), lse


def expected_merge(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge in float64: [T, W h, D] and [T, W h]."""
    weights = lse.double().softmax(0).nan_to_num(0.0)
    return (out.double().nan_to_num(0.0) * weights[..., None]).sum(0), lse.double().logsumexp(0)


def exchanges() -> list[Exchange]:
    group = dist.group.WORLD
    return [AllGatherReduceScatter(group), AllToAll(group), CheckedExchange(AllToAll(group), group)]


def check_combine(device: str = "cpu") -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    heads = slice(rank * H, (rank + 1) * H)
    for exchange, dtype in itertools.product(exchanges(), DTYPES):
        out, lse = partials(size, dtype)
        merged, merged_lse = (tensor.cpu() for tensor in exchange.combine(out[rank].to(device), lse[rank].to(device)))
        wanted, wanted_lse = expected_merge(out, lse)
        assert (merged.dtype, merged.shape, merged_lse.dtype) == (dtype, (T, H, D), torch.float32)
        # One rounding of the result.
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
        torch.testing.assert_close(merged.double(), wanted[:, heads], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(merged_lse.double(), wanted_lse[:, heads], atol=1e-5, rtol=1e-6)
        assert torch.equal(merged[1], torch.zeros(H, D, dtype=dtype))
        assert (merged_lse[1] == -torch.inf).all()


def check_gathers(device: str = "cpu") -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    q = torch.arange(T * size * H * D, dtype=torch.float32).view(T, size * H, D).to(device)
    rows = torch.randn(size, 7, D, generator=torch.Generator().manual_seed(0)).to(device)
    order = torch.randperm(size * 7, generator=torch.Generator().manual_seed(1))[:9].to(device)
    for exchange in exchanges():
        mine = q[:, rank * H : (rank + 1) * H]  # not contiguous
        assert torch.equal(exchange.gather_heads(mine), q)
        exchange.reserve_context(size * 7, D, rows.dtype, rows.device)
        started = exchange.start_context(rows[rank], order, tokens_of_rows(order, 7, rank))
        assert torch.equal(started(), rows.flatten(0, 1)[order])
        candidates = torch.arange(-9 * size, 9 * size).view(size, 6, 3).to(device)
        assert torch.equal(exchange.gather_candidates(candidates[rank]), candidates.transpose(0, 1))
        for dtype in (torch.uint8, torch.float8_e4m3fn):
            check_bytes(exchange, dtype, q.device)


def check_bytes(exchange: Exchange, dtype: torch.dtype, device: torch.device) -> None:
    """Exchange every byte there is, as queries and as rows of a context."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everybody = torch.stack([torch.arange(256, dtype=torch.uint8).roll(rank) for rank in range(size)]).to(device)
    mine = everybody[rank].view(dtype)
    gathered = exchange.gather_heads(mine.view(4, 1, 64))
    assert gathered.dtype == dtype
    assert torch.equal(gathered.view(torch.uint8), everybody.view(size, 4, 64).transpose(0, 1))
    order = torch.arange(4 * size, device=device).flip(0)
    context = exchange.start_context(mine.view(4, 64), order, tokens_of_rows(order, 4, rank))()
    assert context.dtype == dtype
    assert torch.equal(context.view(torch.uint8), everybody.view(-1, 64).flip(0))
    with pytest.raises(ValueError, match=f"rows of {dtype} have 5 elements; the exchange moves even numbers of bytes"):
        exchange.gather_heads(mine[:5].view(1, 1, 5))


def check_skew() -> None:
    """Begin gathers of context one ahead, as prefill does, with a merge in between; in each step other ranks are late:
    results stay those of the step.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.randn(6, size, 4, D, generator=torch.Generator().manual_seed(0))
    order = torch.arange(4 * size).flip(0)
    tokens = tokens_of_rows(order, 4, rank)
    for exchange in exchanges():
        started = [exchange.start_context(rows[0, rank], order, tokens)]
        for step, everybody in enumerate(rows):
            if rank == step % size:
                time.sleep(0.05)
            gathered = started.pop()()
            merged, _ = exchange.combine(torch.full((1, size, D), float(rank + step)), torch.zeros(1, size))
            if rank == (step + 1) % size:
                time.sleep(0.05)
            started += [exchange.start_context(mine, order, tokens) for mine in rows[step + 1 : step + 2, rank]]
            assert torch.equal(gathered, everybody.flatten(0, 1).flip(0))
            torch.testing.assert_close(merged, torch.full((1, 1, D), step + (size - 1) / 2))


def check_all() -> None:
    for check in (check_combine, check_gathers, check_skew):
        check()


@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(5, marks=pytest.mark.thorough), 8])
def test_ranks(num_ranks: int) -> None:
    run_ranks(num_ranks, check_all)


@on_ranks(1)
def test_one_rank_is_the_identity() -> None:
    selection = select_exchange(DCPConfig(dcp_comm_backend="a2a"), dist.group.WORLD, "cpu")
    out, lse = torch.randn(T, H, D), torch.randn(T, H)
    assert selection.exchange.name == "none"
    assert torch.equal(selection.exchange.gather_heads(out), out)
    assert all(map(torch.equal, selection.exchange.combine(out, lse), (out, lse)))
    candidates = torch.randint(9, (T, 5))
    assert torch.equal(selection.exchange.gather_candidates(candidates), candidates[:, None])
    order = torch.arange(T)  # one rank's rows are in token order
    assert torch.equal(selection.exchange.start_context(out[:, 0], order, order)(), out[:, 0])
    with pytest.raises(ValueError, match="out has dtype torch.float64; a2a carries rows of float32 or narrower"):
        AllToAll(dist.group.WORLD).combine(out.double(), lse)


def check_selection() -> list[tuple[str, str]]:
    auto = DCPConfig(tensor_parallel_size=2, decode_context_parallel_size=2)
    layouts = [auto, *(dataclasses.replace(auto, dcp_comm_backend=name) for name in ("ag_rs", "a2a"))]
    fixed = {"deterministic": True, "cp_kv_cache_interleave_size": auto.block_size}
    layouts.append(dataclasses.replace(layouts[1], **fixed))
    selections = [select_exchange(dcp, dist.group.WORLD, "cpu") for dcp in layouts]
    for mistake in ({"dcp_comm_backend": "direct"}, {"dcp_exchange_dtype": "fp8"}):
        with pytest.raises(ValueError, match=f"{next(iter(mistake))} .* the ranks are CPUs; choose auto"):
            select_exchange(dataclasses.replace(layouts[0], **mistake), dist.group.WORLD, "cpu")
    options = dataclasses.replace(auto, exchange_timeout=7.5, dcp_exchange_dtype="fp8")
    on_hopper = patch("torch.cuda.get_device_capability", return_value=(9, 0))
    reaches = patch("dcpmla.comm.select.reach", return_value="")
    with reaches, patch("dcpmla.comm.direct.DirectExchange") as direct, on_hopper:
        select_exchange(options, dist.group.WORLD, "cpu")
    assert direct.call_args.kwargs == {"timeout": 7.5, "is_fp8": True}
    checked = select_exchange(dataclasses.replace(layouts[2], check_exchange=True), dist.group.WORLD, "cpu")
    assert isinstance(checked.exchange, CheckedExchange)
    assert (checked.exchange.name, checked.reason) == ("a2a", "asked for")
    return [(selection.exchange.name, selection.reason) for selection in selections]


def test_selection_says_why() -> None:
    auto, *asked = run_ranks(2, check_selection)[0]
    assert auto[0] == "a2a"
    assert auto[1].startswith("auto: the ranks are CPUs")
    is_deterministic = "asked for ag_rs, whose reduce-scatter adds in no fixed order"
    assert asked == [("ag_rs", "asked for"), ("a2a", "asked for"), ("a2a", is_deterministic)]


def wait_for_missing_rank() -> str:
    """Gather on rank 0 and combine on rank 1, each in a group with a rank that does neither; return the error."""
    rank, limit = dist.get_rank(), timedelta(seconds=3)
    groups = [dist.new_group([each, 2], timeout=limit) for each in (0, 1)]
    if rank == 2:
        return ""
    exchange, at = AllToAll(groups[rank]), torch.zeros(1, dtype=torch.int64)
    calls = (
        lambda: exchange.start_context(torch.zeros(1, D), at, at)(),
        lambda: exchange.combine(torch.zeros(1, 2, D), torch.zeros(1, 2)),
    )
    with pytest.raises(RuntimeError) as failed:
        calls[rank]()
    return "\n".join(failed.value.__notes__)


def test_missing_rank_ends_with_an_error_that_names_rank_and_operation() -> None:
    words = run_ranks(3, wait_for_missing_rank)
    for rank, operation in enumerate(("gather_context", "combine")):
        assert f"{operation} failed on rank {rank} of the group [{rank}, 2]" in words[rank]
