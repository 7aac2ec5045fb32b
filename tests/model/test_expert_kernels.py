"""Blocks of routes, in Triton's interpreter and on a GPU; the grouped products as Hopper gets them."""

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import functional

from dcpmla.cache.formats import FP8
from tests.attention.test_decode_compile import assert_mbarriers_are_apart, compile_for_hopper
from tests.support.kernels import on_both, run_kernels

DTYPES = {"bf16": torch.bfloat16, "fp8e4nv": FP8} | dict.fromkeys(
    ("u8", "int4", "int4_128", "nvfp4", "zeros"), torch.uint8
)
# Types of scales in 4 bits, and their columns.
GROUPS = {
    "u8": ("u8", 32),
    "int4": ("bf16", 32),
    "int4_128": ("bf16", 128),
    "nvfp4": ("fp8e4nv", 16),
    "zeros": ("fp16", 128),
}


def check_blocks(device: str) -> None:
    """Check that every route is in one block of its expert, in order, and no block is missing."""
    from dcpmla.model.kernels.blocks import assign_blocks

    for num_tokens, num_experts, rows in ((7, 5, 4), (1500, 3, 16), (3, 40, 8), (12000, 3, 64), (300, 8, 16)):
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


@on_both
def test_blocks(device: str) -> None:
    run_kernels(device, check_blocks)


@pytest.mark.parametrize("chunk", [256, 1024])
def test_blocks_of_one_chunk_compile(chunk: int) -> None:
    """Without counts that another kernel has made: each program makes its own."""
    from triton.compiler import ASTSource

    from dcpmla.model.kernels.blocks import assign_kernel

    types = {"num_routes": "i32", "num_experts": "i32", "max_blocks": "i32"}
    types |= {f"{name}_ptr": "*i32" for name in ("ids", "counts", "experts", "routes", "num_blocks")}
    constants = {"counts_ptr": None, "ROWS": 64, "BINS": 512, "SPANS": 1, "CHUNK": chunk}
    _, said = compile_for_hopper(assign_kernel, ASTSource, types, constants, num_warps=4)
    assert "0 bytes spill stores" in said


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
        ("nvfp4", True, False),
        ("nvfp4", False, True),
        ("int4_128", True, True),
        ("int4_128", True, False),
        ("zeros", True, True),
        ("zeros", True, False),
        ("zeros", False, False),
    ],
)
def test_the_product_compiles(weights: str, few: bool, gated: bool) -> None:
    from dcpmla.model.kernels.experts import _FEW, _GROUPED, _TILINGS, _ZEROED

    kind = {"int4_128": _GROUPED, "zeros": _ZEROED}.get(weights, DTYPES[weights])
    tiling = _FEW[kind] if few else _TILINGS[kind][-1]
    tile, num_summed = tiling.gate_up if gated else tiling.down, 1 if gated or not few else 9
    ptx, said = compile_product(weights, tile, few, gated, num_summed, enable_fp_fusion=True)
    assert "cp.async.bulk.tensor.4d" in ptx
    assert "wgmma.mma_async" in ptx or (few and weights != "fp8e4nv")  # 8 or 16 rows: not with every Triton
    assert ("f32.e4m3.e4m3" in ptx) == (weights == "fp8e4nv")
    assert "0 bytes spill stores" in said
    if weights == "fp8e4nv":  # no scale is waited for in the loop
        loop = ptx[ptx.index("Inner Loop Header") : ptx.rindex("wgmma.wait_group")]
        assert not re.search(r"ld\.global", loop[: loop.rindex("bra")])
    if DTYPES[weights] == torch.uint8 and "wgmma" in ptx:  # the left side's registers are free for the next one
        loop = ptx[ptx.index("Inner Loop Header") :]
        assert loop.index("wgmma.wait_group") < loop.index("cp.async.bulk.tensor")


def test_a_few_rows_of_integers_compile() -> None:
    """At more than one token."""
    from dcpmla.model.kernels.experts import _GROUPED, _TILINGS, _ZEROED

    for weights, kind in (("int4_128", _GROUPED), ("zeros", _ZEROED)):
        tile = _TILINGS[kind][0].gate_up
        ptx, said = compile_product(weights, tile, False, True, 1, enable_fp_fusion=True)
        assert ("mul.rn.bf16x2" in ptx) != tile.scales_sums  # scales multiply sums or integers
        assert "0 bytes spill stores" in said


def constants_of(weights: str, gated: bool) -> dict[str, Any]:
    """Return a product's sizes, and the bounds of its activation: of some packed weights as Kimi-K3's."""
    sizes = {"TOP_K": 9, "WIDTH": 512, "K": 7168} if gated else {"TOP_K": 1, "WIDTH": 7168, "K": 512}
    is_bounded = weights in ("u8", "fp4")
    bounds = (4.0, 25.0, True) if is_bounded else (None, None, False)
    return sizes | dict(zip(("gate_bound", "up_bound", "IS_SMOOTH"), bounds, strict=True))


def compile_product(
    weights: str, tile: Any, few: bool, gated: bool, num_summed: int, enable_fp_fusion: bool
) -> tuple[str, str]:
    from triton.compiler import ASTSource

    from dcpmla.model.kernels.grouped import grouped_product_kernel
    from dcpmla.model.kernels.packed import packed_product_kernel

    is_packed = DTYPES[weights] == torch.uint8
    parts, depth = (1 + gated, tile.depth // 2) if is_packed else (1 + tile.is_stacked, tile.depth)
    types = {
        "x_ptr": "*bf16" if weights != "fp8e4nv" else "*fp8e4nv",
        "x_scales_ptr": "*fp32",
        "w_desc": f"tensordesc<{'u8' if is_packed else weights}[1, {parts}, {tile.columns}, {depth}]>",
        "w_scales_ptr": "*fp32",
        "scales_ptr": f"*{GROUPS.get(weights, ('bf16',))[0]}",
        "zeros_ptr": "*u8",
        "factors_ptr": "*fp32",
        "experts_ptr": "*i32",
        "routes_ptr": "*i32",
        "expert_weights_ptr": "*fp32",
        "out_ptr": "*bf16",
    }
    constants: dict[str, Any] = {"ROWS": tile.rows, "BLOCK_ROWS": tile.rows, "DEPTH": tile.depth}
    constants |= constants_of(weights, gated)
    constants["NUM_SUMMED"] = num_summed
    constants |= {"STAGES": tile.num_stages}
    constants |= {"GROUP": GROUPS[weights][1], "SCALES_SUMS": tile.scales_sums} if is_packed else {"GATED": gated}
    left_out = [(few, "routes_ptr"), (not gated, "expert_weights_ptr"), (weights == "bf16", "w_scales_ptr")]
    left_out += [(weights == "bf16", "x_scales_ptr"), (is_packed and weights != "zeros", "zeros_ptr")]
    left_out.append((is_packed and weights != "nvfp4", "factors_ptr"))
    constants |= {name: None for is_left_out, name in left_out if is_left_out}
    kernel = packed_product_kernel if is_packed else grouped_product_kernel
    options = {"num_warps": tile.num_warps, "enable_fp_fusion": enable_fp_fusion}
    return compile_for_hopper(kernel, ASTSource, types, constants, **options)


@pytest.mark.parametrize(
    ("weights", "gated"),
    [("bf16", True), ("fp8e4nv", True), ("fp8e4nv", False), ("fp4", True), ("int4", False), ("zeros", True)],
)
def test_the_product_of_many_rows_compiles(weights: str, gated: bool) -> None:
    ptx, said = compile_product_of_many_rows(weights, gated, enable_fp_fusion=True)
    assert "wgmma.mma_async.sync.aligned.m64n128k" in ptx
    assert ("f32.e4m3.e4m3" in ptx) == (weights == "fp8e4nv")
    assert "cp.async.bulk.tensor.2d" in ptx
    assert "cp.async.mbarrier.arrive.noinc" in ptx
    assert_mbarriers_are_apart(ptx)
    # As with too few registers, where each product waits for the one before.
    assert "wgmma.mma_async instructions are serialized" not in said


def compile_product_of_many_rows(weights: str, gated: bool, enable_fp_fusion: bool) -> tuple[str, str]:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from dcpmla.model.hopper.product import grouped_product_kernel

    is_packed, is_fp8 = weights in ("fp4", "int4", "zeros"), weights == "fp8e4nv"
    dtype, width, swizzle = ("i32", 8, 32) if is_packed else (weights, 128 if is_fp8 else 64, 128)
    bits = 8 * swizzle // width
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
    types = {
        "x_ptr": "*fp8e4nv" if is_fp8 else "*bf16",
        "x_scales_ptr": "*fp32",
        "w_desc": f"tensordesc<{dtype}[128, {width}],{layout}>",
        "w_scales_ptr": {"fp4": "*u16", "int4": "*i32", "zeros": "*fp16"}.get(weights, "*fp32"),
        "w_zeros_ptr": "*u8",
        "experts_ptr": "*i32",
        "routes_ptr": "*i32",
        "num_blocks_ptr": "*i32",
        "expert_weights_ptr": "*fp32",
        "out_ptr": "*fp8e4nv" if is_fp8 and gated else "*bf16",
        "out_scales_ptr": "*fp32",
    }
    constants: dict[str, Any] = {"GATED": gated, "DTYPE": gl.bfloat16, "SCALE_STEPS": 2 if weights == "zeros" else 1}
    constants |= {} if weights == "zeros" else {"w_zeros_ptr": None}
    constants |= constants_of(weights, gated)
    constants |= {"x_scales_stride_row": 1} if is_fp8 else {"x_scales_ptr": None}
    left_out = [
        (weights == "bf16", "w_scales_ptr"),
        (not gated, "expert_weights_ptr"),
        (not (is_fp8 and gated), "out_scales_ptr"),
    ]
    constants |= {name: None for is_left_out, name in left_out if is_left_out}
    options = {"num_warps": 4, "enable_fp_fusion": enable_fp_fusion}
    return compile_for_hopper(grouped_product_kernel, GluonASTSource, types, constants, **options)


@pytest.mark.parametrize(("weights", "gated"), [("fp8e4nv", False), ("bf16", True)])
def test_products_in_a_fixed_order_round_alike(weights: str, gated: bool) -> None:
    """In both kernels and in each tile: the same steps of the tensor cores, the same arithmetic for a number."""
    from dcpmla.model.kernels.experts import _FEW, _TILINGS, _widen

    tilings = [_widen(tiling) for tiling in (_FEW[DTYPES[weights]], *_TILINGS[DTYPES[weights]])]
    tiles = {(tiling.gate_up if gated else tiling.down): index == 0 for index, tiling in enumerate(tilings)}
    compiled = [
        (compile_product(weights, tile, few, gated, 1, False)[0], tile.rows * tile.columns // (32 * tile.num_warps))
        for tile, few in tiles.items()
    ]
    # A thread of each of two consumers has half of both parts.
    numbers = 64 if gated else 128
    compiled.append((compile_product_of_many_rows(weights, gated, False)[0], 2 * numbers))
    shares = []
    for ptx, numbers in compiled:
        steps = set(re.findall(r"mma\S*\.m\d+n\d+(k\d+\.\S+)", ptx))
        assert steps == {"k32.f32.e4m3.e4m3" if weights == "fp8e4nv" else "k16.f32.bf16.bf16"}
        counts = Counter(re.findall(r"\t(fma|add|sub|div|ex2|mul)\.[a-z.]*f32", ptx))
        if not gated:
            assert counts.pop("mul") < numbers  # a product has one for each scale
        shares.append({name: count / numbers for name, count in counts.items()})
    assert all(share == shares[0] for share in shares)
    assert shares[0].get("fma") == (None if gated else 1)
    assert gated == ("add" in shares[0])
