"""Checks of sums over a TP group, wherever they run, against float64 and transformers' norm."""

import random
import time

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from dcpmla.comm.direct_reduce import DirectReduce
from dcpmla.comm.reduce import Reduce
from dcpmla.comm.terms import Terms, whole
from dcpmla.parallel.quantized import NormedRows, quantize_groups
from tests.support.direct_checks import BITS

EPS = 0.1  # that a norm without it is far off
# Of a sum, rounded once from float32, and of its norm, rounded twice; the sum of a row's squares may be in any order.
TOLERANCES = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6, torch.float64: 1e-12}

Inputs = tuple[Tensor, Tensor, Tensor]


def draw(num_tokens: int, width: int, dtype: torch.dtype, seed: int, device: torch.device) -> Inputs:
    """Draw all ranks' partial rows [W, T, N], the residual [T, N] and the norm's weight [N]."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.randn(dist.get_world_size() + 1, num_tokens, width, generator=generator, device=device).to(dtype)
    weight = 1 + torch.randn(width, generator=generator, device=device).to(dtype) / 4
    return drawn[:-1], drawn[-1], weight


def check_sums(
    reduce: Reduce, shape: tuple[int, int], dtype: torch.dtype, seed: int, device: torch.device, is_odd: bool = False
) -> None:
    """Check both operations, with this rank late at random.

    Args:
        is_odd: the first row holds an infinity and the NaN, all ones, that means "not here".
    """
    partials, residual, weight = draw(*shape, dtype, seed, device)
    if is_odd:
        partials.view(BITS[dtype])[-1, 0, 0] = -1
        partials[0, 0, -1] = torch.inf
    own, mine = random.Random(seed + dist.get_rank()), partials[dist.get_rank()]
    time.sleep(own.choice((0, 0.02)))
    total = reduce.all_reduce(mine.clone())
    time.sleep(own.choice((0, 0.02)))
    normed, new_residual = reduce.add_norm(mine.clone(), residual, weight, EPS)
    assert_right(total, partials.double().sum(0))
    assert_right(new_residual, residual.double() + partials.double().sum(0))
    assert_normed(normed, new_residual, weight)
    assert_same_on_all_ranks(total, normed, new_residual)


def check_terms(reduce: Reduce, shape: tuple[int, int], dtype: torch.dtype, seed: int, device: torch.device) -> None:
    """Check that terms count as the rows that they add up to, and absent terms, which are NaN, as nothing."""
    (partial, *_), residual, weight = draw(3 * shape[0], shape[1], dtype, seed, device)
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    ids = torch.randint(-1, 5, (shape[0], 3), generator=generator, dtype=torch.int32).to(device)
    is_here = ((ids >= 0) & (ids < 4)).flatten()[:, None]
    terms = Terms(torch.where(is_here, partial, torch.nan), ids, 4)
    wanted = torch.where(is_here, partial, 0).double().view(*ids.shape, shape[1]).sum(1)
    rows, residual = whole(terms), residual[: shape[0]]
    assert_right(rows, wanted)
    assert torch.equal(reduce.all_reduce(terms), reduce.all_reduce(rows.clone()))
    normed, new_residual = reduce.add_norm(terms, residual, weight, EPS)
    assert torch.equal(new_residual, reduce.add_norm(rows.clone(), residual, weight, EPS)[1])
    assert_normed(normed, new_residual, weight)


def check_quantized(reduce: Reduce, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Check that codes are the normalized rows' codes, and that these rows are the same without codes."""
    partials, residual, weight = draw(*shape, dtype, 1, device)
    partial = partials[dist.get_rank()]
    rows, new_residual = reduce.add_norm(partial.clone(), residual, weight, EPS, True)
    assert isinstance(rows, NormedRows)
    wanted, scales = quantize_groups(rows.plain.cpu(), 128)  # a GPU's division by a number is a product
    assert torch.equal(rows.quantized.values.cpu().view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(rows.quantized.scales.cpu(), scales)
    assert rows.quantized.scales.stride() == (1, -(-len(residual) // 4) * 4)
    assert_normed(rows.plain, new_residual, weight)
    assert torch.equal(new_residual, reduce.add_norm(partial.clone(), residual, weight, EPS)[1])
    assert_same_on_all_ranks(rows.plain)


def assert_right(got: Tensor, wanted: Tensor) -> None:
    """Check sums [T, N] whose terms are of the order of 1 against those in float64."""
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(
        got.double(), wanted, atol=8e-7 if tolerance > 1e-8 else 1e-12, rtol=tolerance, equal_nan=True
    )


def assert_normed(normed: Tensor, rows: Tensor, weight: Tensor) -> None:
    """Check a norm against transformers': rounded as often, which few sums in another order do not hide."""
    norm = DeepseekV3RMSNorm(len(weight), EPS).to(rows.device, rows.dtype)
    norm.weight.data.copy_(weight)
    wanted, tolerance = norm(rows), 4 * TOLERANCES[rows.dtype]
    torch.testing.assert_close(normed, wanted, atol=1e-6, rtol=tolerance, equal_nan=True)
    if rows.element_size() == 2:
        num_different = (normed.nan_to_num() != wanted.nan_to_num()).sum()
        assert num_different <= rows.numel() // 50


def assert_same_on_all_ranks(*results: Tensor) -> None:
    for result in results:
        of_all = [torch.empty_like(result) for _ in range(dist.get_world_size())]
        dist.all_gather(of_all, result)
        assert all(torch.equal(one.view(torch.uint8), result.view(torch.uint8)) for one in of_all)


def check_memory(reduce: DirectReduce) -> None:
    """Check, after all ranks, that landings are empty, and programs have counted alike."""
    dist.barrier()
    assert (reduce._landings.mine == 0xFF).all()
    state = reduce._memory[1].state
    assert (state[:-1] == state[0]).all()
    assert state[-1] == 0
    reduce.check()
