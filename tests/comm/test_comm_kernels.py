"""Triton kernels of the exchange against `merge_partials`: on a GPU, in Triton's interpreter without one, and compiled
for Hopper.
"""

import itertools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from torch import Tensor

from dcpmla.comm import nccl
from dcpmla.comm.kernels.exchange import combine_kernel, gather_kernel
from dcpmla.comm.kernels.merge import merge_kernel, merge_rows, weigh_kernel, weigh_rows
from dcpmla.comm.kernels.window import place_kernel
from tests.comm.test_exchange import expected_merge, partials
from tests.support.hopper import compile_source, new_source, ptx_for_hopper
from tests.support.kernels import cut, on_both, run_kernels
from tests.support.ranks import on_ranks


def draw(num_parts: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Draw `partials`, of two tokens for the interpreter: one that all ranks hold nothing of, and one other."""
    num_tokens = 2 if device == "cpu" else None
    out, lse = partials(num_parts, dtype)
    return out[:, :num_tokens].contiguous(), lse[:, :num_tokens].contiguous()


def check_merge_rows(device: str) -> None:
    tolerances = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
    for num_parts, (dtype, tolerance) in itertools.product((1, 2, 3, 8), tolerances.items()):
        out, lse = draw(num_parts, dtype, device)
        strided = lse.to(device).transpose(0, 1).contiguous().transpose(0, 1)
        merged, merged_lse = merge_rows(cut(out.to(device)), strided)
        wanted, wanted_lse = expected_merge(out, lse)
        torch.testing.assert_close(merged.double().cpu(), wanted, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(merged_lse.double().cpu(), wanted_lse, atol=1e-5, rtol=1e-6)


def check_weigh_rows(device: str) -> None:
    """Check that the ranks' weighed rows add up to the merged ones, those of each owner apart."""
    for size, dtype in ((1, torch.float32), (2, torch.bfloat16), (3, torch.float64), (8, torch.float16)):
        out, lse = draw(size, dtype, device)
        weighed = [weigh_rows(cut(rows), lse.to(device), rank) for rank, rows in enumerate(out.to(device))]
        for (shares, merged_lse), (wanted, wanted_lse) in zip(
            weighed, (nccl.weigh_rows(out[rank], lse, rank) for rank in range(size)), strict=True
        ):
            assert shares.dtype == wanted.dtype
            torch.testing.assert_close(shares.cpu(), wanted, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(merged_lse.cpu(), wanted_lse, atol=1e-5, rtol=1e-6)
        merged = sum(shares.double().cpu() for shares, _ in weighed)
        wanted, wanted_lse = expected_merge(out, lse)
        torch.testing.assert_close(merged.transpose(0, 1).flatten(1, 2), wanted, atol=1e-5, rtol=1e-5)


@on_both
def test_kernels(device: str) -> None:
    run_kernels(device, check_merge_rows, check_weigh_rows)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_kernels_compile_for_hopper(dtype: str) -> None:
    types = dict.fromkeys(("lse_ptr", "merged_lse_ptr", "shares_ptr"), "*fp32")
    for kernel, size in ((merge_kernel, "NUM_PARTS"), (weigh_kernel, "SIZE")):
        ptx_for_hopper(kernel, dtype, {size: 8, "PARTS": 8, "COLUMNS": 512}, **types)


def compile_direct(kernel: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int = 4) -> str:
    """Return the PTX of a kernel of `direct`; check that rows travel, and are awaited, 16 bytes a thread."""
    types = {"addresses_ptr": "*i64", "state_ptr": "*i32", "fault_ptr": "*i64", **types}
    source = new_source(kernel, types, constants, "stride|landing_bytes|_at$")
    ptx = str(compile_source(source, {"num_warps": num_warps}).asm["ptx"])
    if constants["COLUMNS"] > 4:
        assert "st.global.v4.b32" in ptx
        assert not re.search(r"(st|ld)(\.volatile)?\.global\.b(8|16)\b", ptx)
    return ptx


@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize(
    ("dtype", "carrier", "is_fp8"), [("bf16", "i16", False), ("fp32", "i32", False), ("bf16", "i16", True)]
)
def test_landings_compile_for_hopper(dtype: str, carrier: str, is_fp8: bool, size: int) -> None:
    """A word is loaded once for all its uses: it may come in between two loads."""
    peers = triton.next_power_of_2(size)
    common = {"SIZE": size, "PEERS": peers, "COLUMNS": 128, "IS_FP8": is_fp8, "PROGRAMS": 2048}
    rows = {"q_ptr": f"*{carrier}", "gathered_ptr": f"*{dtype}", "out_ptr": f"*{carrier}", "merged_ptr": f"*{dtype}"}
    lses = {"lse_ptr": "*fp32", "merged_lse_ptr": "*fp32"}
    for kernel, constants, num_words in (
        (gather_kernel, {"WIDTH": 9216}, 0),
        (combine_kernel, {"WIDTH": 512, "IS_SENT": False}, 1),
    ):
        ptx = compile_direct(kernel, {**rows, **lses}, {**common, **constants}, num_warps=1)
        assert "ld.volatile.global.v4.b32" in ptx
        assert ptx.count("ld.volatile.global.b64") == num_words + is_fp8
        assert ("e4m3x2" in ptx) == is_fp8


@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize("carrier", ["i16", "i32"])
def test_window_compiles_for_hopper(carrier: str, size: int) -> None:
    """Rows travel between flags that other GPUs see."""
    common = {"SIZE": size, "PEERS": triton.next_power_of_2(size), "THREADS": 128, "PROGRAMS": 2048}
    context = {"OPERATION": 2, "WIDTH": 576, "ROWS": 16, "COLUMNS": 64}
    heads = {"OPERATION": 0, "WIDTH": 9216, "ROWS": 1, "COLUMNS": 1024, "targets_ptr": None}
    narrow = {"OPERATION": 2, "WIDTH": 196, "ROWS": 256, "COLUMNS": 4}  # 392 bytes: a latent of 256 as fp8_ds_mla
    for constants in (context, heads, narrow):
        ptx = compile_direct(place_kernel, {"rows_ptr": f"*{carrier}", "targets_ptr": "*i64"}, {**common, **constants})
        assert ptx.count("atom.global.sys.release") == ptx.count("atom.global.sys.acquire") == 2


@on_ranks(1)
def test_rows_in_transit_are_aligned() -> None:
    """Check that rows are loaded 16 bytes at a time where all strides are multiples of 16 elements."""
    merge, strides = nccl.merge_rows, []
    nccl.merge_rows = lambda out, lse: (strides.extend(out.stride()[:3]), merge(out, lse))[1]  # type: ignore[assignment]
    for width, dtype in ((512, torch.bfloat16), (512, torch.float32), (40, torch.float16), (1, torch.bfloat16)):
        out = torch.randn(2, 3, width).to(dtype)
        assert torch.equal(nccl.AllToAll(dist.group.WORLD).combine(out, torch.zeros(2, 3))[0], out)
    assert len(strides) == 12
    assert all(stride % 16 == 0 for stride in strides)
