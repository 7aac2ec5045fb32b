"""Sums over a TP group: collectives, `direct` in Triton's interpreter, what is refused, what the benchmark reports."""

import json
import random
import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dcpmla.__main__ import main
from dcpmla.comm import direct_ops, direct_reduce
from dcpmla.comm.calls import NormedSum
from dcpmla.comm.kernels import reduce as kernels
from dcpmla.comm.norm import add_norm
from dcpmla.comm.reduce import CollectiveReduce, Reduce, select_reduce
from dcpmla.comm.terms import Terms
from dcpmla.parallel.collectives import PeerFault
from tests.comm.test_comm_kernels import compile_direct
from tests.support.interpreter import convert_as_torch
from tests.support.kernels import run_kernels
from tests.support.ranks import on_ranks, run_ranks
from tests.support.reduce_checks import EPS, check_memory, check_quantized, check_sums, check_terms, draw
from tests.support.shared_memory import allocate, delay_kernels, run_interpreted

CPU = torch.device("cpu")


def check_collective() -> None:
    group = dist.group.WORLD
    chosen, in_order = select_reduce(group, CPU), CollectiveReduce(group, is_deterministic=True)
    assert isinstance(chosen, CollectiveReduce)
    for reduce in (chosen, in_order):
        for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32, torch.float64)):
            check_sums(reduce, (3, 24), dtype, seed, CPU, is_odd=dtype == torch.bfloat16 and reduce is chosen)
            check_terms(reduce, (3, 24), dtype, seed, CPU)
        check_sums(reduce, (0, 8), torch.float32, 0, CPU)
        check_terms(reduce, (0, 8), torch.float32, 0, CPU)
        check_quantized(reduce, (3, 256), torch.bfloat16, CPU)
        check_quantized(reduce, (0, 128), torch.bfloat16, CPU)
        refuse(reduce)
        reduce.check()
    if dist.get_world_size() > 1:
        check_order(in_order, (24, 7))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_collective(num_ranks: int) -> None:
    run_ranks(num_ranks, check_collective)


def refuse(reduce: Reduce) -> None:
    partial, weight = torch.zeros(3, 8), torch.ones(8)
    for residual, given in ((partial[:2], weight), (partial.double(), weight), (partial, weight[:4])):
        with pytest.raises(ValueError, match=r"residual is .* expected the same as the rows|weight has shape \(4,\)"):
            reduce.add_norm(partial, residual, given, 1e-6)
    with pytest.raises(ValueError, match="the rows to add have 8 columns; rows are quantized in groups of 128"):
        reduce.add_norm(partial, partial, weight, 1e-6, True)


def new_reduce(**changes: Any) -> direct_reduce.DirectReduce:
    return direct_reduce.DirectReduce(**{"group": dist.group.WORLD, "device": CPU, "allocate": allocate, **changes})


def shrink(num_programs: int) -> None:
    """Let a launch have a few programs, of several items each.

    The interpreter runs programs one after the other: each must hold whole rows, as they await each other's squares.
    """
    direct_ops.NUM_PROGRAMS = direct_reduce.NUM_PROGRAMS = num_programs
    direct_reduce._NARROW_ELEMENTS, direct_reduce._WIDE_ELEMENTS = 300, 600


def check_direct() -> None:
    """Check sums in one trip and in two, of rows of one item each and of several, in one turn and in several."""
    delay_kernels(random.Random(dist.get_rank()))
    convert_as_torch()
    common, size = random.Random(7), dist.get_world_size()
    for num_programs, widths, quantized in ((4, (8, 64), ()), (1, (136, 264), ((1 << 20, (1, 256)), (0, (3, 384))))):
        shrink(num_programs)
        reduce = new_reduce(landing_bytes=1 << 13)
        reduce._memory[1].state[:-1] = 2**31 - 3  # the exchange numbers pass 32 bits
        for step in range(4):
            direct_reduce._ONE_SHOT_BYTES = (1 << 20, 0)[step % 2]
            dtype = (torch.float16, torch.float32)[step // 2]
            shape = common.randint(1, 3 + 6 * (step == 1)), common.choice(widths)
            check_sums(reduce, shape, dtype, step, CPU, is_odd=step in (0, 3))
            if step in (0, 3):
                check_terms(reduce, shape, dtype, step, CPU)
        assert reduce.all_reduce(torch.zeros(0, 8)).shape == (0, 8)
        for one_shot_bytes, shape in quantized:
            direct_reduce._ONE_SHOT_BYTES = one_shot_bytes
            check_quantized(reduce, shape, torch.float16, CPU)
        check_memory(reduce)
    refuse(reduce)
    with pytest.raises(ValueError, match=f"landing_bytes is 256; {size} ranks' rows of 512 columns take more"):
        new_reduce(landing_bytes=256).all_reduce(torch.zeros(1, 512))
    with pytest.raises(ValueError, match="partial has dtype torch.float64; direct carries"):
        reduce.all_reduce(torch.zeros(1, 8, dtype=torch.float64))


def check_order(reduce: Reduce, widths: tuple[int, ...]) -> None:
    """Check that float32 sums are made one rank after the other, and that a row of the sums and of their norms has the
    same bits in steps of any number of rows; sums in the reversed order differ.
    """
    rank, num_rows = dist.get_rank(), 4
    for width in widths:
        partials, residual, weight = draw(num_rows, width, torch.float32, 0, CPU)
        partials[0] *= 100  # roundings then differ
        total, reverse = torch.zeros(2, num_rows, width)
        for one, other in zip(partials, partials.flip(0), strict=True):
            total, reverse = total + one, reverse + other
        assert torch.equal(total, reverse) == (len(partials) < 3)
        normed, new_residual = None, total + residual
        for rows in (slice(num_rows), slice(2, 3)):
            assert torch.equal(reduce.all_reduce(partials[rank, rows].clone()), total[rows])
            out, added = reduce.add_norm(partials[rank, rows].clone(), residual[rows], weight, EPS)
            assert torch.equal(added, new_residual[rows])
            normed = out if normed is None else normed
            assert torch.equal(out, normed[rows])


@on_ranks(3, run_interpreted)
def test_direct_in_rank_order() -> None:
    """Check one trip and two, whose items have 64 columns in one row and 256 in four."""
    delay_kernels(random.Random(dist.get_rank()))
    convert_as_torch()
    shrink(1)
    reduce = new_reduce(landing_bytes=1 << 14, is_deterministic=True)
    for one_shot_bytes in (1 << 20, 0):
        direct_reduce._ONE_SHOT_BYTES = one_shot_bytes
        check_order(reduce, (96,))


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_direct(num_ranks: int) -> None:
    run_interpreted(num_ranks, check_direct)


@on_ranks(7, run_interpreted)
def test_missing_rank() -> None:
    """Leave the first of seven ranks out of three groups: the others of each wait for it once, and report it."""
    rank, missing = dist.get_rank(), 0
    delay_kernels(random.Random(rank))
    shrink(2)
    groups = [[missing, 2 * number + 1, 2 * number + 2] for number in range(3)]
    reduces = []
    for group in map(dist.new_group, groups):
        if dist.get_rank(group) >= 0:
            new_reduce(group=group).all_reduce(torch.zeros(1, 8))  # the first call is slow
            reduces.append(new_reduce(group=group, timeout=2.0))
    if rank == missing:
        return
    (reduce,), rows, weight = reduces, torch.zeros(4, 8), torch.ones(8)
    direct_reduce._ONE_SHOT_BYTES = (1 << 20, 1 << 20, 0)[(rank - 1) // 2]
    operation = ("all_reduce", "add_norm", "add_norm")[(rank - 1) // 2]
    for most_seconds in (6.0, 2.0):
        start = time.monotonic()
        _ = reduce.all_reduce(rows) if operation == "all_reduce" else reduce.add_norm(rows, rows, weight, 1e-6)
        assert time.monotonic() - start < most_seconds
        here = f"rank {rank} of the group {groups[(rank - 1) // 2]}"
        words = f"{operation} failed on {here}: nothing came from rank {missing} for 2 s"
        if most_seconds > 2:
            for again in (reduce.check, lambda: reduce.all_reduce(rows)):
                with pytest.raises(PeerFault, match=re.escape(words)):
                    again()
        reduce.fault.zero_()  # kernels then run as they do in graphs


@pytest.mark.parametrize(
    ("kernel", "size", "columns", "is_deterministic", "num_terms"),
    [
        ("one_shot", 8, 128, False, 9),
        ("two_shot", 3, 512, False, 9),
        ("one_shot", 8, 128, True, 0),
        ("two_shot", 4, 256, True, 0),
    ],
)
def test_kernels_compile_for_hopper(
    kernel: str, size: int, columns: int, is_deterministic: bool, num_terms: int
) -> None:
    tiles, peers = -(-7168 // columns), 8 if size > 4 else 4
    names = ("residual_ptr", "weight_ptr", "normed_ptr", "sums_ptr")
    types = {**dict.fromkeys(names, "*bf16"), "partial_ptr": "*i16", "squares_ptr": "*i64", "eps": "fp32"}
    types |= {"codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}
    constants = {"WIDTH": 7168, "SIZE": size, "PEERS": peers, "COLUMNS": columns, "PROGRAMS": 2048, "TERMS": num_terms}
    (types if num_terms else constants)["ids_ptr"] = "*i32" if num_terms else None
    constants["IN_ORDER"], constants["TILES"] = is_deterministic, 1 << (tiles - 1).bit_length()
    ptx = compile_direct(getattr(kernels, f"{kernel}_kernel"), types, constants, num_warps=1)
    assert "ld.volatile.global.v4.b32" in ptx


def check_norm_of_terms(device: str) -> None:
    from dcpmla.comm.kernels.norm import add_norm as add_norm_kernel

    for num_rows, width, num_terms in ((1, 8, 1), (5, 300, 3)):
        rows, weight = torch.randn(num_rows * num_terms, width, device=device), torch.randn(width, device=device)
        ids = torch.arange(num_rows * num_terms, dtype=torch.int32, device=device).view(num_rows, num_terms) % 4 - 1
        rows[ids.flatten() < 0] = torch.nan
        call = NormedSum(Terms(rows, ids, 2), torch.randn(num_rows, width, device=device), weight, EPS)
        for one, other in zip(add_norm_kernel(call)[:2], add_norm.reference(call)[:2], strict=True):
            torch.testing.assert_close(one, other)


def test_the_norm_adds_terms() -> None:
    run_kernels("cpu", check_norm_of_terms)


@pytest.mark.gpu
def test_the_norm_adds_terms_on_a_gpu() -> None:
    run_kernels("cuda", check_norm_of_terms)


@pytest.mark.usefixtures("one_process_on_cpu")
def test_bench_reports_wrong_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "reduce.json"
    command = ["bench", "reduce", "--tokens", "1,3", "--row-width", "32", "--device", "cpu", "--json", str(out)]
    with patch.object(CollectiveReduce, "add_norm", lambda self, partial, *_: (partial, partial)):
        assert main(command) == 1
    assert all(row["error"] > 0.1 for row in json.loads(out.read_text())["rows"])
    assert capsys.readouterr().out.count("WRONG") == 2
