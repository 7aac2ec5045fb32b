"""The kernels of attention in a fixed order: bits on a GPU; against the reference in Triton's interpreter."""

import itertools
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tests.support.ordered import Batch, Sizes, alone, decode, prefill
from tests.support.shared_memory import run_interpreted

pytest.importorskip("triton")

SMALL = Sizes(dtype=torch.float16)
V3 = Sizes(128, 512, 64, 128, 128, torch.bfloat16, device="cuda")
FORMATS = ("auto", "fp8", "fp8_ds_mla")
BATCH: Batch = [(1, 700, 1), (2, 64, 1), (3, 1, 1), (4, 130, 1)]
SEGMENTS: Batch = [(1, 70, 3), (2, 700, 4)]


def check_decode_in_the_interpreter() -> None:
    from dcpmla.attention.triton import ordered_decode as kernel
    from tests.support.interpreter import convert_as_torch

    convert_as_torch()
    kernel._SPLIT.value = 1  # several splits of few tiles
    for size, batch, max_query_len in ((1, BATCH, 1), (2, SEGMENTS, 2), (8, BATCH, 1)):
        wanted = decode(SMALL, size, batch, max_query_len)
        for num_rows in (1 << 16, 1):  # each split in a slot of its own, and all in one
            with patch.object(kernel, "ORDERED_ROWS", num_rows), patch.object(kernel, "SPLIT_TILES", 1):
                got = decode(SMALL, size, batch, max_query_len, run=kernel.run)
            for mine, other in zip(itertools.chain(*got), itertools.chain(*wanted), strict=True):
                torch.testing.assert_close(mine, other, atol=2e-2, rtol=2e-2)
            if num_rows > 1:
                first = got
        assert all(map(torch.equal, itertools.chain(*got), itertools.chain(*first)))


def test_decode_in_the_interpreter() -> None:
    run_interpreted(1, check_decode_in_the_interpreter)
