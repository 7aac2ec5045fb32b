"""Blocks of routes, in Triton's interpreter and on a GPU; the grouped products as Hopper gets them."""

import re
from typing import Any

import pytest
import torch
from torch.nn import functional

from dcpmla.cache.formats import FP8
from tests.attention.test_decode_compile import compile_for_hopper
from tests.support.shared_memory import run_interpreted


def check_blocks(device: str) -> None:
    """Check that every route is in one block of its expert, in order, and no block is missing."""
    from dcpmla.model.kernels.blocks import assign_blocks

    for num_tokens, num_experts, rows in ((7, 5, 4), (1500, 3, 16), (3, 40, 8), (12000, 3, 64)):
        ids = torch.randint(-2, num_experts + 2, (num_tokens, 3), generator=torch.Generator().manual_seed(0)).int()
        experts, routes, number = (part.cpu() for part in assign_blocks(ids.to(device), num_experts, rows))
        wanted_experts, wanted_routes = [], []
        for expert in range(num_experts):
            own = (ids.flatten() == expert).nonzero().flatten().int()
            blocks = list(functional.pad(own, (0, -len(own) % rows), value=-1).split(rows)) if len(own) else []
            wanted_experts += [expert] * len(blocks)
            wanted_routes += blocks
        assert experts.tolist() == [*wanted_experts, *[-1] * (len(experts) - len(wanted_experts))]
        assert torch.equal(routes[: len(wanted_routes)], torch.stack(wanted_routes))
        assert number.tolist() == [len(wanted_experts)]


def test_blocks_in_the_interpreter() -> None:
    run_interpreted(1, check_blocks, "cpu")


@pytest.mark.gpu
def test_blocks() -> None:
    check_blocks("cuda")


@pytest.mark.parametrize(
    ("weights", "few", "gated"),
    [
        ("bf16", True, True),
        ("fp8e4nv", True, True),
        ("fp8e4nv", True, False),
        ("bf16", False, True),
        ("u8", False, True),
        ("int4", False, True),
        ("int4", True, False),
    ],
)
def test_the_product_compiles(weights: str, few: bool, gated: bool) -> None:
    pytest.importorskip("triton")
    from triton.compiler import ASTSource

    from dcpmla.model.kernels.experts import _FEW, _TILINGS
    from dcpmla.model.kernels.grouped import grouped_product_kernel
    from dcpmla.model.kernels.packed import packed_product_kernel

    dtype = {"bf16": torch.bfloat16, "fp8e4nv": FP8, "u8": torch.uint8, "int4": torch.uint8}[weights]
    tiling = _FEW[dtype] if few else _TILINGS[dtype][-1]
    tile = tiling.gate_up if gated else tiling.down
    is_packed = dtype == torch.uint8
    parts, depth = (1 + gated, tile.depth // 2) if is_packed else (1 + tile.is_stacked, tile.depth)
    types = {
        "x_ptr": "*bf16" if weights != "fp8e4nv" else "*fp8e4nv",
        "x_scales_ptr": "*fp32",
        "w_desc": f"tensordesc<{'u8' if is_packed else weights}[1, {parts}, {tile.columns}, {depth}]>",
        "w_scales_ptr": "*fp32",
        "scales_ptr": "*u8" if weights == "u8" else "*bf16",
        "experts_ptr": "*i32",
        "routes_ptr": "*i32",
        "expert_weights_ptr": "*fp32",
        "out_ptr": "*bf16",
    }
    constants: dict[str, Any] = {"ROWS": tile.rows, "BLOCK_ROWS": tile.rows, "DEPTH": tile.depth}
    constants |= {"gate_bound": None, "up_bound": None, "IS_SMOOTH": False}
    if weights in ("u8", "fp4"):  # as Kimi-K3's
        constants |= {"gate_bound": 4.0, "up_bound": 25.0, "IS_SMOOTH": True}
    constants |= {"TOP_K": 9 if gated else 1, "NUM_SUMMED": 1 if gated or not few else 9}
    constants |= {"WIDTH": 512, "K": 7168} if gated else {"WIDTH": 7168, "K": 512}
    constants |= {"STAGES": tile.num_stages} | ({} if is_packed else {"GATED": gated})
    left_out = [(few, "routes_ptr"), (not gated, "expert_weights_ptr"), (weights == "bf16", "w_scales_ptr")]
    left_out.append((weights == "bf16", "x_scales_ptr"))
    constants |= {name: None for is_left_out, name in left_out if is_left_out}
    kernel = packed_product_kernel if is_packed else grouped_product_kernel
    ptx, said = compile_for_hopper(kernel, ASTSource, types, constants, num_warps=tile.num_warps)
    assert "cp.async.bulk.tensor.4d" in ptx
    assert "wgmma.mma_async" in ptx or (few and weights != "fp8e4nv")  # 8 or 16 rows: not with every Triton
    assert ("f32.e4m3.e4m3" in ptx) == (weights == "fp8e4nv")
    assert "0 bytes spill stores" in said
    if weights == "fp8e4nv":  # no scale is waited for in the loop
        loop = ptx[ptx.index("Inner Loop Header") : ptx.rindex("wgmma.wait_group")]
        assert not re.search(r"ld\.global", loop[: loop.rindex("bra")])
    if is_packed and "wgmma" in ptx:  # the registers of its left side are free when the next ones are made
        loop = ptx[ptx.index("Inner Loop Header") :]
        assert loop.index("wgmma.wait_group") < loop.index("cp.async.bulk.tensor")


@pytest.mark.parametrize(
    ("weights", "gated"), [("bf16", True), ("fp8e4nv", True), ("fp8e4nv", False), ("fp4", True), ("int4", False)]
)
def test_the_product_of_many_rows_compiles(weights: str, gated: bool) -> None:
    pytest.importorskip("triton")
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from dcpmla.model.hopper.product import grouped_product_kernel

    is_packed, is_fp8 = weights in ("fp4", "int4"), weights == "fp8e4nv"
    dtype, width, swizzle = ("i32", 8, 32) if is_packed else (weights, 128 if is_fp8 else 64, 128)
    bits = 8 * swizzle // width
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
    types = {
        "x_ptr": "*fp8e4nv" if is_fp8 else "*bf16",
        "x_scales_ptr": "*fp32",
        "w_desc": f"tensordesc<{dtype}[128, {width}],{layout}>",
        "w_scales_ptr": {"fp4": "*u16", "int4": "*i32"}.get(weights, "*fp32"),
        "experts_ptr": "*i32",
        "routes_ptr": "*i32",
        "num_blocks_ptr": "*i32",
        "expert_weights_ptr": "*fp32",
        "out_ptr": "*fp8e4nv" if is_fp8 and gated else "*bf16",
        "out_scales_ptr": "*fp32",
    }
    constants: dict[str, Any] = {"TOP_K": 9 if gated else 1, "GATED": gated, "DTYPE": gl.bfloat16}
    constants |= {"gate_bound": None, "up_bound": None, "IS_SMOOTH": False}
    if weights in ("u8", "fp4"):  # as Kimi-K3's
        constants |= {"gate_bound": 4.0, "up_bound": 25.0, "IS_SMOOTH": True}
    constants |= {"WIDTH": 512, "K": 7168} if gated else {"WIDTH": 7168, "K": 512}
    constants |= {"x_scales_stride_row": 1} if is_fp8 else {"x_scales_ptr": None}
    left_out = [
        (weights == "bf16", "w_scales_ptr"),
        (not gated, "expert_weights_ptr"),
        (not (is_fp8 and gated), "out_scales_ptr"),
    ]
    constants |= {name: None for is_left_out, name in left_out if is_left_out}
    ptx, said = compile_for_hopper(grouped_product_kernel, GluonASTSource, types, constants, num_warps=4)
    assert "wgmma.mma_async.sync.aligned.m64n128k" in ptx
    assert ("f32.e4m3.e4m3" in ptx) == is_fp8
    assert "cp.async.bulk.tensor.2d" in ptx
    assert "cp.async.mbarrier.arrive.noinc" in ptx
    # As with too few registers, where each product waits for the one before.
    assert "wgmma.mma_async instructions are serialized" not in said
