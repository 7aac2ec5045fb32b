"""Hashes of n-grams: against integers of any size in plain Python, whatever steps the tokens come in.

Kernels run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dcpmla.attention.step.metadata import StepBuilder, StepMetadata
from dcpmla.attention.step.table import StepRequests, StepTable, StepTraits, TableSizes
from dcpmla.config import DCPConfig
from dcpmla.model.buckets import Buckets
from dcpmla.model.ngrams import NgramHash, hash_ngrams, store_ids
from dcpmla.model.token_slots import TokenSlots
from tests.attention.test_decode_compile import compile_for_hopper
from tests.support.plain_ngrams import hash_row
from tests.support.shared_memory import run_interpreted
from tests.support.step_tables import fill_table, lay_out_step

VOCAB_SIZE, NUM_IDS, PAD_ID, BLOCK = 50, 17, 3, 4
ORDERS = [2, 2, 3, 3, 4]
# Products with these need more than 32 bits, and nearly all of 63.
MULTIPLIERS = [[2**31 + 11, 2**58 + 1, 7, 2**40 - 1], [5, 2**33 + 3, 2**58 - 1, 2**20 + 9]]
PRIMES = [[101, 103, 107, 109, 113], [127, 131, 137, 139, 2**31 - 1 - 200_000_000]]
PROMPTS = ([5, 9, 2, 7, 7, 1, 30, 4, 4, 8, 21], [11, 12], [*range(20, 49)])


def token_map() -> Tensor:
    return torch.randint(NUM_IDS, (VOCAB_SIZE,), generator=torch.Generator().manual_seed(0)).int()


def make_buckets(device: str = "cpu") -> Buckets:
    primes = torch.tensor(PRIMES)
    # A rank's first bucket does not start at row 0 here.
    tensors = torch.tensor(MULTIPLIERS), torch.tensor(ORDERS), primes, primes.cumsum(1) - primes + 7
    return Buckets(*(tensor.to(device) for tensor in tensors))


def expected(tokens: list[int]) -> Tensor:
    """Return the hashes [L, T, C] of a whole sequence."""
    ids = [int(token_map()[token]) for token in tokens]
    rows = [
        [hash_row(ids[: end + 1], PAD_ID, own, ORDERS, primes) for end in range(len(ids))]
        for own, primes in zip(MULTIPLIERS, PRIMES, strict=True)
    ]
    return torch.tensor(rows) + 7


def step_of(pieces: list[tuple[int, int, int]], tables: list[list[int]], padding: int, device: str) -> StepMetadata:
    """Return the step of (request, first position, number of tokens), a row of the table each, then padding."""
    lens, ends = [num for _, _, num in pieces], [first + num for _, first, num in pieces]
    requests = StepRequests(lens, ends, [tables[request] for request, _, _ in pieces])
    sizes = TableSizes(len(pieces) + 1, sum(lens) + padding, 0)
    layout = StepBuilder(DCPConfig(), 0, "cpu", StepTraits(block_tokens=BLOCK, has_slots=False)).layout
    step = lay_out_step(fill_table(requests, sizes), sizes, layout)
    table = StepTable(*(column.to(device) for column in step.table))
    return replace(step, table=table, tokens=step.tokens.map(lambda column: column.to(device)))


def slots_of(step: StepMetadata) -> TokenSlots:
    return TokenSlots(step.tokens.request, step.tokens.seq_lens, step.table.block_table)


def check(device: str) -> None:
    """Compute three requests in turns of odd sizes, with padding between; the third has blocks of the first."""
    tables = [[2, 5, 1, 0, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0, 0, 0], [9, 3, 10, 11, 12, 4, 13, 6]]
    cached = torch.full((14, BLOCK), -1, dtype=torch.int32, device=device)
    cached[0] = 12345  # the block of padding, which no request has
    cache: Any = SimpleNamespace(token_ids=cached)
    hashes = NgramHash(token_map().to(device), PAD_ID, make_buckets(device))
    done = [0, 0, 0]
    for size, padding in ((3, 0), (1, 2), (7, 1), (2, 0), (5, 3), (30, 0)):
        pieces = [
            (request, first, min(size, len(prompt) - first))
            for request, (prompt, first) in enumerate(zip(PROMPTS, done, strict=True))
            if first < len(prompt)
        ]
        tokens = [token for request, first, num in pieces for token in PROMPTS[request][first : first + num]]
        ids = torch.tensor([*tokens, *[0] * padding], device=device)
        got = hashes(ids, step_of(pieces, tables, padding, device), cache)
        hashed = [expected(PROMPTS[request])[:, first : first + num] for request, first, num in pieces]
        assert torch.equal(got[:, : len(tokens)].long().cpu(), torch.cat(hashed, 1))
        assert (got >= 0).all()
        for request, _, num in pieces:
            done[request] += num
    assert (cached[0] == 12345).all()


def test_hashes_in_any_steps() -> None:
    check("cpu")


def check_shared_and_rejected(device: str) -> None:
    """Read a prefix that another request computed, and no tokens that were rejected."""
    cache: Any = SimpleNamespace(token_ids=torch.full((8, BLOCK), -1, dtype=torch.int32, device=device))
    hashes = NgramHash(token_map().to(device), PAD_ID, make_buckets(device))
    tables = [[1, 2, 3], [1, 4, 5]]
    tables = [[*table, *[0] * 5] for table in tables]
    first, second = [5, 9, 2, 7, 7, 1], [5, 9, 2, 7, 8, 8, 13, 14]
    hashes(torch.tensor(first, device=device), step_of([(0, 0, 6)], tables, 0, device), cache)
    drafts = torch.tensor([8, 40, 41, 42], device=device)  # all but the first are wrong
    hashes(drafts, step_of([(1, 4, 4)], tables, 0, device), cache)
    got = hashes(torch.tensor(second[5:], device=device), step_of([(1, 5, 3)], tables, 0, device), cache)
    assert torch.equal(got.long().cpu(), expected(second)[:, 5:])


def test_shared_prefixes_and_rejected_drafts() -> None:
    check_shared_and_rejected("cpu")


def test_a_repeated_row_is_stored_once() -> None:
    """A padded request repeats its last token."""
    cached = torch.full((3, BLOCK), -1, dtype=torch.int32)
    seq_lens = torch.tensor([6, 6, 6], dtype=torch.int32)
    rows = TokenSlots(torch.zeros(3, dtype=torch.int32), seq_lens, torch.tensor([[1, 2]], dtype=torch.int32))
    store_ids(cached, torch.tensor([30, 30, 30]), token_map(), rows)
    assert (cached.flatten() >= 0).nonzero().tolist() == [[2 * BLOCK + 1]]


def test_a_step_between_graphs() -> None:
    """While a graph is captured, the step's own part is kept, and each replay runs it with its own step."""
    kept: list[Any] = []
    module = NgramHash(token_map(), PAD_ID, make_buckets())
    cache: Any = SimpleNamespace(token_ids=torch.zeros(4, BLOCK, dtype=torch.int32))
    step = step_of([(0, 0, 5)], [[1, 2, 0, 0, 0, 0, 0, 0]], 0, "cpu")
    static = replace(step, defer=lambda work, arguments: kept.append((work, arguments)))
    ids = torch.zeros(8, dtype=torch.int64)
    hashes = module(ids, static, cache)
    assert not hashes.any()
    ids[:5] = torch.tensor([5, 9, 2, 7, 7])
    ((work, arguments),) = kept
    work(*arguments, step)
    assert torch.equal(hashes[:, :5].long(), expected([5, 9, 2, 7, 7]))
    assert not hashes[:, 5:].any()


def test_a_profile_has_hashes_without_a_cache() -> None:
    assert NgramHash(token_map(), PAD_ID, make_buckets())(torch.zeros(6).long(), None, None).shape == (2, 6, 5)


def test_hashes_of_one_token_of_each_request() -> None:
    """A step of drafts reads the tokens before its own, which are cached, and writes no other."""
    cache: Any = SimpleNamespace(token_ids=torch.full((8, BLOCK), -1, dtype=torch.int32))
    hashes = NgramHash(token_map(), PAD_ID, make_buckets())
    tables = [[1, 2, 3], [4, 5, 6]]
    hashes(torch.tensor([*PROMPTS[0][:7], *PROMPTS[2][:5]]), step_of([(0, 0, 7), (1, 0, 5)], tables, 0, "cpu"), cache)
    steps = StepBuilder(DCPConfig(block_size=BLOCK), 0)
    step = steps.build(StepRequests([3, 3], [10, 8], tables), 3)
    for index in range(3):
        tokens = torch.tensor([PROMPTS[0][7 + index], PROMPTS[2][5 + index]])
        got = hashes(tokens, step.nth_token(index), cache)
        wanted = [expected(PROMPTS[0])[:, 7 + index], expected(PROMPTS[2])[:, 5 + index]]
        assert torch.equal(got.long(), torch.stack(wanted, 1))
        assert int((cache.token_ids >= 0).sum()) == 12 + 2 * (1 + index)


def test_the_operators() -> None:
    step = step_of([(0, 0, 5)], [[1, 2, 0, 0, 0, 0, 0, 0]], 1, "cpu")
    rows = slots_of(step)
    cached, ids = torch.zeros(4, BLOCK, dtype=torch.int32), torch.arange(6)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(store_ids.op, (cached, ids, token_map(), *rows), test_utils=checks)
    hashes = torch.zeros(2, 6, 5, dtype=torch.int32)
    torch.library.opcheck(hash_ngrams.op, (hashes, cached, *rows, *make_buckets(), PAD_ID), test_utils=checks)


def check_kernels(device: str) -> None:
    """Run the same checks by the kernels."""
    from dcpmla.model import ngrams
    from dcpmla.model.kernels import ngrams as kernels

    ngrams.store_ids, ngrams.hash_ngrams = kernels.store_ids, kernels.hash_ngrams  # type: ignore[assignment]
    check(device)
    check_shared_and_rejected(device)
    empty = TokenSlots(torch.zeros(0).int(), torch.zeros(0).int(), torch.zeros(1, 8).int())
    empty = TokenSlots(*(column.to(device) for column in empty))
    hashes = torch.zeros(2, 0, 5, dtype=torch.int32, device=device)
    kernels.hash_ngrams(hashes, torch.zeros(4, BLOCK, dtype=torch.int32, device=device), empty, make_buckets(device), 3)


def test_the_kernels_in_the_interpreter() -> None:
    run_interpreted(1, check_kernels, "cpu")


@pytest.mark.gpu
def test_the_kernels() -> None:
    check("cuda")
    check_shared_and_rejected("cuda")


def test_the_kernels_compile() -> None:
    from triton.compiler import ASTSource

    from dcpmla.model.kernels.ngrams import hash_ngrams_kernel, store_ids_kernel

    int64 = ("token_ids_ptr", "multipliers_ptr", "orders_ptr", "primes_ptr", "starts_ptr")
    int32 = ("hashes_ptr", "cached_ids_ptr", "token_map_ptr", "request_ptr", "seq_lens_ptr", "table_ptr")
    types = dict.fromkeys(int64, "*i64") | dict.fromkeys(int32, "*i32")
    sizes = {"DISTANCES": 4, "COLUMNS": 3, "COLUMNS_P": 4, "TOKENS": 64}
    for kernel, constants in ((store_ids_kernel, {"TOKENS": 64}), (hash_ngrams_kernel, sizes)):
        _, said = compile_for_hopper(kernel, ASTSource, types, constants, num_warps=4)
        assert "0 bytes spill stores" in said
