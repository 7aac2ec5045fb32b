"""Checks of the exchange `direct`, in Triton's interpreter and on GPUs, against plain slicing and a float64 merge."""

import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcpmla.attention.select.candidates import EMPTY, pack_candidates
from dcpmla.comm import direct_ops
from dcpmla.comm.direct import DirectExchange
from dcpmla.merge import merge_partials
from tests.support.shared_memory import send_rows

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
TOLERANCES = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 3e-6}  # the interpreter truncates
DTYPES = (torch.float16, torch.float32)  # in the interpreter

Shape = tuple[int, int, int]  # tokens, heads a rank, row width
SHAPES: tuple[Shape, ...] = ((1, 16, 512), (33, 8, 128), (8, 16, 576))  # on GPUs, in bfloat16


def tokens_of_rows(order: Tensor, num_rows: int, rank: int) -> Tensor:
    """Invert `order` for one sender.

    Args:
        order: [S] int64, for each token its row in the ranks' rows laid end to end.
        num_rows: N, of each rank.
    Returns:
        [N] int64, the token of each of this rank's rows, or -1.
    """
    tokens = order.new_full((num_rows,), -1)
    mine = (order // num_rows == rank).nonzero().flatten()
    tokens[order[mine] % num_rows] = mine
    return tokens


def exchange_on_gpu(**changes: Any) -> DirectExchange:
    options = {"group": dist.group.WORLD, "device": torch.device("cuda", torch.cuda.current_device()), **changes}
    return DirectExchange(**options)


def seconds_on_gpu(call: Callable[[], object]) -> float:
    """Return the time that a call and the GPU's work take."""
    start = time.monotonic()
    call()
    torch.cuda.synchronize()
    return time.monotonic() - start


def check_replays(
    run: Callable[[list[tuple[Tensor, ...]]], list[Tensor]],
    draw_inputs: Callable[[int], list[tuple[Tensor, ...]]],
    between: Callable[[int], object],
) -> None:
    """Check replays of a graph, mixed with eager calls before each and one after it (`between`)."""
    held = draw_inputs(0)
    run(held)  # compiles before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outcomes = run(held)
    for seed in range(1, 4):
        given = draw_inputs(seed)
        wanted = run(given)
        for inputs, new in zip(held, given, strict=True):
            for tensor, value in zip(inputs, new, strict=True):
                tensor.copy_(value)
        graph.replay()
        between(seed)
        assert_same_bits(outcomes, wanted)


def draw(exchange: DirectExchange, shape: Shape, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw all ranks' queries [T, W h, D], partial rows [W, T, W h, D] and LSEs [W, T, W h].

    Some hold the bits, all ones, that mean "not here".
    """
    num_tokens, num_heads, width = shape
    device, generator = exchange.device, torch.Generator(exchange.device).manual_seed(seed)
    q = torch.randn(num_tokens, exchange.size * num_heads, width, generator=generator, device=device).to(dtype)
    out = torch.randn(exchange.size, *q.shape, generator=generator, device=device).to(dtype)
    lse = 5 * torch.randn(out.shape[:-1], generator=generator, device=device)
    lse[torch.rand(lse.shape, generator=generator, device=device) < 0.3] = -torch.inf
    lse[:, seed % 7 : seed % 7 + 1] = -torch.inf
    if exchange.is_fp8:
        # Numbers that e4m3 represents, scales that are powers of two: the interpreter rounds unlike GPUs and lacks
        # e4m3's NaN.
        for rows in (q, out):
            rows.copy_(rows.clamp(-1.75, 1.75).to(torch.float8_e4m3fn))
            rows[..., ::8] = 1.75
    else:
        q.view(BITS[dtype])[0, 0, 0] = -1
        for rank, token, head in (lse != -torch.inf).nonzero()[:1]:
            out.view(BITS[dtype])[rank, token, head, 0] = -1
    out.view(BITS[dtype])[lse == -torch.inf] = -1
    return q, out, lse


def own_heads(exchange: DirectExchange, shape: Shape) -> slice:
    rank = dist.get_rank(exchange.group)
    return slice(rank * shape[1], (rank + 1) * shape[1])


def draw_own(exchange: DirectExchange, shape: Shape, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw this rank's queries [T, h, D], partial rows [T, W h, D] and LSEs [T, W h]."""
    (q, out, lse), rank = draw(exchange, shape, torch.bfloat16, seed), dist.get_rank(exchange.group)
    return q[:, own_heads(exchange, shape)].contiguous(), out[rank], lse[rank]


def exchange_all(exchange: DirectExchange, q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return exchange.gather_heads(q), *exchange.combine(out, lse)


def assert_same_bits(got: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def lay_out(tensor: Tensor, kind: int) -> Tensor:
    """Return the same numbers contiguous, with the first two dims swapped, with padding after each row, or strided."""
    if kind == 0:
        return tensor.contiguous()
    if kind == 1:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == 2:
        return torch.cat([tensor, torch.full_like(tensor, torch.nan)[..., :8]], -1)[..., : tensor.shape[-1]]
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1)[..., 0]


def exchange_once(
    exchange: DirectExchange, shape: Shape, dtype: torch.dtype, seed: int, own: random.Random, num_layouts: int = 4
) -> None:
    """Check a gather of heads and a combine, with this rank late at random and its rows in a layout of its own."""
    rank, heads = dist.get_rank(exchange.group), own_heads(exchange, shape)
    q, out, lse = draw(exchange, shape, dtype, seed)
    kinds = [own.randrange(num_layouts) for _ in range(3)]
    gathered = exchange.gather_heads(lay_out(q[:, heads], kinds[0]))
    time.sleep(own.choice((0, 0.02)))
    mailbox = exchange.mailbox(*out.shape[1:], dtype)
    if mailbox and exchange.device.type == "cpu" and own.random() < 0.3:  # the others cannot tell
        place = exchange._mailbox.state, exchange._mailbox.landing_bytes
        send_rows(out[rank], lse[rank], exchange._landings, *place, rank)
        merged, merged_lse = torch.empty_like(out[rank, :, heads]), torch.empty_like(lse[rank, :, heads])
        direct_ops.enter("out", merged, mailbox)
        direct_ops.collect(merged, merged_lse, mailbox)
    else:
        merged, merged_lse = exchange.combine(lay_out(out[rank], kinds[1]), lay_out(lse[rank], kinds[2]))
    time.sleep(own.choice((0, 0.02)))
    wanted, wanted_lse = merge_partials(out.double(), lse.double())
    torch.testing.assert_close(gathered, q, atol=0, rtol=0, equal_nan=True)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(merged, wanted[:, heads].to(dtype), atol=tolerance, rtol=tolerance, equal_nan=True)
    torch.testing.assert_close(merged_lse, wanted_lse[:, heads].float(), atol=1e-5, rtol=1e-6)


def exchange_contexts(exchange: DirectExchange, num_chunks: int, common: random.Random, own: random.Random) -> None:
    """Check context chunks of growing and shrinking sizes, each read at once, and again as late as possible."""
    rank = dist.get_rank(exchange.group)
    held: deque[tuple[Tensor, Tensor]] = deque()
    for chunk in range(num_chunks + 2):
        if len(held) == 2 or chunk >= num_chunks:
            got, wanted = held.popleft()
            time.sleep(own.choice((0, 0.1)))
            assert torch.equal(got, wanted)
        if chunk < num_chunks:
            num_rows, width, dtype = common.randint(1, 60), common.choice((8, 40, 64)), common.choice(DTYPES)
            generator = torch.Generator().manual_seed(chunk)
            wide = torch.randn(exchange.size, num_rows, width + 8, generator=generator).to(exchange.device, dtype)
            rows, order = wide[..., :width], torch.randperm(exchange.size * num_rows, generator=generator)
            order = order[: common.randint(1, len(order))].to(rows.device)
            finish = exchange.start_context(rows[rank], order, tokens_of_rows(order, num_rows, rank))
            held.append((finish(), rows.flatten(0, 1)[order]))
            assert torch.equal(*held[-1])


def exchange_bytes(exchange: DirectExchange) -> None:
    """Check that one-byte queries and cached rows arrive unchanged, also where wider queries travel as e4m3."""
    rank = dist.get_rank(exchange.group)
    generator = torch.Generator(exchange.device).manual_seed(0)
    # Not 0xFF: all ones means "not here", and arrives as another NaN.
    q = torch.randint(255, (3, 2 * exchange.size, 48), generator=generator, device=exchange.device, dtype=torch.uint8)
    gathered = exchange.gather_heads(q[:, 2 * rank : 2 * rank + 2].view(torch.float8_e4m3fn))
    assert gathered.dtype == torch.float8_e4m3fn
    assert torch.equal(gathered.view(torch.uint8), q)
    rows = q.view(exchange.size, 6, 48)[..., :20]  # not a multiple of 16 bytes, as some rows of fp8_ds_mla
    order = torch.arange(6 * exchange.size, device=exchange.device).flip(0)
    context = exchange.start_context(rows[rank], order, tokens_of_rows(order, 6, rank))()
    assert torch.equal(context, rows.flatten(0, 1).flip(0))


def draw_candidates(size: int, num: int, device: torch.device) -> Tensor:
    """Draw int64 candidates [W, 3, num]; the first token's scores compare in odd ways, the last has none."""
    generator = torch.Generator().manual_seed(num)
    scores = torch.randn(size, 3, num, generator=generator)
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])[:num]
    scores[:, 0, : len(odd)] = odd
    candidates = pack_candidates(scores, torch.arange(num))
    candidates[:, 2] = EMPTY
    return candidates.to(device)


def exchange_candidates(exchange: DirectExchange) -> None:
    """Check that candidates arrive unchanged, also an odd number of them, and where wider queries travel as e4m3."""
    for num in (5, 64):
        candidates = draw_candidates(exchange.size, num, exchange.device)
        gathered = exchange.gather_candidates(candidates[dist.get_rank(exchange.group)])
        assert torch.equal(gathered, candidates.transpose(0, 1))


def check_memory(exchange: DirectExchange) -> None:
    """Check, after all ranks, that landings are empty, words are their exchanges', and programs have counted alike."""
    dist.barrier(exchange.group)
    landings = exchange._landings.mine[: 2 * exchange._mailbox.landing_bytes]
    numbers = exchange._landings.mine[2 * exchange._mailbox.landing_bytes :].view(torch.int64).view(2, -1) >> 32
    assert (landings == 0xFF).all()
    assert ((numbers == 0) | (numbers % 2 == torch.tensor([[0], [1]], device=numbers.device))).all()
    counters, has_failed = exchange._mailbox.state[:-1], exchange._mailbox.state[-1]
    assert (counters == counters[0]).all()
    assert has_failed == 0
    exchange.check()
