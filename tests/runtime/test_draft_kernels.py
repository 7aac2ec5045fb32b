"""The kernels between a step with drafts and the next, against the functions that specify them.

They run on a GPU, in Triton's interpreter without one, and are compiled for Hopper.
"""

import random

import pytest
import torch

from dcpmla.cache.latent import CachePlan
from dcpmla.runtime.layout import UNWRITTEN, Numbers, move_back
from dcpmla.runtime.ngram import lookup
from tests.attention.test_small_kernels import compile_for_hopper
from tests.support.shared_memory import run_interpreted


def check_lookup(device: str) -> None:
    from dcpmla.runtime.kernels import lookup as kernels

    rng = random.Random(0)
    for num_wanted, tile in ((1, 16), (3, 32), (5, 16)):
        texts = torch.randint(3, (9, 60), dtype=torch.int32)
        sampled, num_accepted = torch.randint(3, (40,)), torch.randint(num_wanted + 1, (3,))
        columns = [
            (8, 1, 0, 0, -1),  # no text to look at
            (3, 40, 0, 0, -1),
            (5, 50, 7, 1, -1),  # a token under way
            # drafts under way
            *((order, rng.randrange(2, 45), 9 + 6 * order, 1 + num_wanted, order) for order in range(3)),
        ]
        there = torch.tensor(columns).T.contiguous()
        own_texts = texts.to(device, copy=True)
        arguments = [tensor.to(device) for tensor in (there, sampled, num_accepted)]
        drafts = kernels.lookup(own_texts, *arguments, num_wanted, 3, 8, tile=tile)
        assert drafts.tolist() == lookup(texts, there, sampled, num_accepted, num_wanted).tolist()
        assert torch.equal(own_texts.cpu(), texts)
        assert any(found[0] >= 0 for found in drafts.tolist())
        alone = kernels.lookup(
            own_texts, arguments[0][:, 1:2].contiguous(), *arguments[1:], num_wanted, 3, 8, tile=tile
        )
        assert alone.tolist() == drafts[1:2].tolist()


def check_moves(device: str) -> None:
    from dcpmla.runtime.kernels import layout

    for query_len, dcp_size, interleave in ((1, 1, 1), (4, 2, 1), (4, 4, 4), (3, 2, 8)):
        plan = CachePlan(
            num_layers=1, num_blocks=99, block_size=8, row_width=2, dtype=torch.float32, dcp_size=dcp_size,
            interleave=interleave,
        )  # fmt: skip
        num_reqs, num_rows = 50, 50 * query_len
        numbers = Numbers(
            token_ids=torch.zeros(num_rows, dtype=torch.int64),
            positions=(torch.randint(query_len, 90, (num_reqs, 1)) + torch.arange(query_len)).flatten(),
            slot_mapping=torch.randint(UNWRITTEN, 2, (num_rows,)),
            local_seq_lens=torch.zeros(num_rows, dtype=torch.int32),
            seq_lens=torch.randint(2, (num_rows,), dtype=torch.int32),
            states=torch.zeros(num_rows, dtype=torch.int32),
            num_rejected=torch.randint(query_len, (num_reqs,)),
            block_table=torch.randint(99, (num_reqs, 30), dtype=torch.int32),
        )
        for rank in range(dcp_size):
            expected = Numbers(*(column.clone() for column in numbers))
            moved = Numbers(*(column.to(device, copy=True) for column in numbers))
            move_back(expected, plan, rank)
            layout.move_back(moved, plan, rank)
            here = numbers.seq_lens > 0  # the rest is padding, which has no positions
            for column, wanted in zip(moved[:-2], expected[:-2], strict=True):
                assert torch.equal(column.cpu()[here], wanted[here])
            assert not moved.seq_lens[~here.to(device)].any()
            assert torch.equal(moved.slot_mapping.cpu() == UNWRITTEN, numbers.slot_mapping == UNWRITTEN)


def check_in_the_interpreter() -> None:
    check_lookup("cpu")
    check_moves("cpu")


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted(1, check_in_the_interpreter)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_lookup("cuda")
    check_moves("cuda")


def test_they_compile_for_hopper() -> None:
    pytest.importorskip("triton")
    from dcpmla.runtime.kernels.layout import move_kernel
    from dcpmla.runtime.kernels.lookup import lookup_kernel

    constants = {"NUM_WANTED": 3, "SHORTEST": 3, "LONGEST": 8, "TOKENS": 4, "TILE": 2048}
    compile_for_hopper(lookup_kernel, "i64", constants, texts_ptr="*i32")
    constants = {"QUERY_LEN": 4, "BLOCK_SIZE": 64, "DCP_SIZE": 2, "INTERLEAVE": 1, "UNWRITTEN": -2, "ROWS": 128}
    types = dict.fromkeys(("seq_lens_ptr", "local_seq_lens_ptr", "table_ptr"), "*i32")
    compile_for_hopper(move_kernel, "i64", constants, **types)
