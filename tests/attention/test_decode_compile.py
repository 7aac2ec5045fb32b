"""Decode kernels compiled for Hopper, without a GPU."""

import re
from pathlib import Path
from typing import Any

import pytest
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from dcpmla.attention.hopper.decode import decode_kernel as hopper_kernel
from dcpmla.attention.hopper.deterministic_decode import deterministic_kernel
from dcpmla.attention.triton.decode import decode_kernel
from dcpmla.attention.triton.deterministic_decode import choose_tile
from dcpmla.attention.triton.deterministic_units import deterministic_decode_kernel as ordered_kernel
from tests.support.hopper import build_for_hopper, compile_for_hopper


def assert_mbarriers_are_apart(ptx: str) -> None:
    """Assert that nothing else is stored where an mbarrier is: Triton gives away the memory of one without a role."""
    offsets = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    starts = {int(offsets[register]) for register in re.findall(r"mbarrier\.init\S*\s+\[(%r\d+)\]", ptx)}
    assert len(starts) > 4
    mbarriers = {start + byte for start in starts for byte in range(8)}
    for parts, start in re.findall(r"st\.shared(?:\.v(\d))?\.b32\s+\[global_smem\+(\d+)\]", ptx):
        assert mbarriers.isdisjoint(range(int(start), int(start) + 4 * int(parts or 1))), start


POINTERS = {
    "table_ptr": "*i32",
    "lens_ptr": "*i32",
    "lse_ptr": "*fp32",
    "counters_ptr": "*i32",
    "partials_ptr": "*fp32",
}


@pytest.mark.parametrize(
    ("q", "cache", "rows", "is_ragged", "own_heads"),
    [
        ("bf16", "bf16", "heads", False, "i32"),
        ("bf16", "bf16", "sparse", False, None),
        ("fp8e4nv", "fp8e4nv", "tiled", True, "i32"),
        ("bf16", "fp8e4nv", "tiled", True, None),
        ("bf16", "u8", "sparse", False, 1),
        ("bf16", "bf16", "shared", False, "i32"),
        ("fp16", "u8", "shared", False, "i32"),
    ],
)
def test_the_hopper_kernel_compiles(
    q: str, cache: str, rows: str, is_ragged: bool, own_heads: str | int | None
) -> None:
    """Each producer with each kind of consumers. own_heads: of rows that are sent; Triton makes a constant of 1."""

    is_fp8, is_converted, is_sparse, is_shared = q == "fp8e4nv", q != cache, rows != "tiled", rows == "shared"
    bits = 8 if is_fp8 else 16

    def tiles(width: int) -> str:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=min(128, width * bits // 8), element_bitwidth=bits, rank=2)
        return f"tensordesc<{q}[64, {width}],{layout}>"

    types = {**POINTERS, "q_desc": tiles(256), "out_ptr": f"*{'bf16' if is_fp8 else q}", "scale": "fp32"}
    constants: dict[str, Any] = {"REQS": 32, "IS_SPARSE": is_sparse, "IS_CONVERTED": is_converted}
    constants |= {"ROW_STRIDE": None, "PAGE_STRIDE": None}
    if is_converted or is_sparse:
        types["rows_ptr"] = "*i32" if is_converted else f"*{cache}"
        constants["ROW_STRIDE"] = (576 if not is_shared else 512) // (4 if is_converted else 1)
        if cache == "u8":
            constants |= {"ROW_STRIDE": 576 // 4, "PAGE_STRIDE": 37440 // 4} if is_shared else {"ROW_STRIDE": 656 // 4}
    else:
        types |= {"kv_desc": tiles(256), "k_pe_desc": tiles(64)}
    if not is_shared:
        types["q_pe_desc"] = tiles(64)
    types |= {name: "*fp32" for name, dtype in (("q_scale_ptr", q), ("kv_scale_ptr", cache)) if dtype == "fp8e4nv"}
    if is_ragged:
        types |= {"start_ptr": "*i32", "index_ptr": "*i32"}
    if own_heads is not None:
        types |= {"addresses_ptr": "*i64", "state_ptr": "*i32"}
        constants |= {"own_heads": 1} if own_heads == 1 else {}
    else:
        constants |= dict.fromkeys(("addresses_ptr", "state_ptr", "rank", "own_heads", "num_rows", "landing_bytes"))
    constants |= {} if rows == "heads" else {"q_token_stride": None}  # queries are stored head by head
    optional = ("q_pe_desc", "kv_desc", "k_pe_desc", "rows_ptr", "index_ptr", "start_ptr")
    optional += ("q_scale_ptr", "kv_scale_ptr")
    constants |= {name: None for name in optional if name not in types}
    ptx, said = compile_for_hopper(hopper_kernel, GluonASTSource, types, constants, num_warps=4)
    product = "m64n64k32.f32.e4m3.e4m3" if is_fp8 else "m64n256k16"
    assert f"wgmma.mma_async.sync.aligned.{product}" in ptx
    assert "bytes stack frame" in said
    # As with too few registers, where each waits for the one before.
    assert "wgmma.mma_async instructions are serialized" not in said
    assert "cp.async.bulk.tensor" in ptx
    # What transposes values on their way into registers.
    assert ("ldmatrix.sync.aligned.m8n8.x4.trans" in ptx) == is_fp8
    assert ("cp.async.cg.shared.global" in ptx) == (is_sparse and not is_converted)
    assert ("cvt.rn.f16x2.e4m3x2" in ptx) == is_converted
    assert_mbarriers_are_apart(ptx)


@pytest.mark.parametrize(
    ("rows", "q", "cache", "latent", "rope"),
    [
        (64, "bf16", "bf16", 512, 64),
        (16, "fp8e4nv", "fp8e4nv", 512, 64),
        (16, "bf16", "u8", 512, 64),
        (16, "bf16", "bf16", 512, 0),
        (16, "bf16", "u8", 512, 0),
        (32, "bf16", "bf16", 1024, 64),
    ],
)
def test_the_portable_kernel_compiles(rows: int, q: str, cache: str, latent: int, rope: int) -> None:
    types = {
        **POINTERS,
        "index_ptr": "*i32",
        "start_ptr": "*i32",
        "q_ptr": f"*{q}",
        "cache_ptr": f"*{cache}",
        "out_ptr": "*bf16",
        "scale": "fp32",
    }
    types |= {f"{name}_scale_ptr": "*fp32" for name, dtype in (("q", q), ("kv", cache)) if dtype == "fp8e4nv"}
    constants = {"ROWS": rows, "LATENT": latent, "ROPE": rope, "REQS": 32}
    types |= {"q_pe_ptr": f"*{q}"} if rope else {}
    constants |= {name: None for name in ("q_pe_ptr", "q_scale_ptr", "kv_scale_ptr") if name not in types}
    ptx, _ = compile_for_hopper(decode_kernel, ASTSource, types, constants, num_warps=4 if rows == 16 else 8)
    assert "sm_90a" in ptx


@pytest.mark.parametrize(
    ("cache", "shared_bytes"),
    [("bf16", 232_448), ("fp8e4nv", 232_448), ("u8", 232_448), ("bf16", 166_912), ("bf16", 101_376), ("bf16", 65_536)],
)
def test_the_kernel_in_a_fixed_order_compiles(cache: str, shared_bytes: int) -> None:
    """With the tile for each size of shared memory. With five stages keys are loaded while others are multiplied."""
    tile = choose_tile(576, shared_bytes)
    types = POINTERS | {"q_ptr": "*bf16", "q_pe_ptr": "*bf16", "cache_ptr": f"*{cache}", "scale": "fp32"}
    types |= {"lses_ptr": "*fp32", "first_rows_ptr": "*i32", "kv_scale_ptr": "*fp32"}
    constants = {"ROWS": tile.rows, "KEYS": tile.keys, "LATENT": 512, "ROPE": 64, "SEGMENTS": 32}
    constants |= dict.fromkeys(("index_ptr", "start_ptr", *(("kv_scale_ptr",) if cache != "fp8e4nv" else ())))
    multiples = tuple(name for name in ordered_kernel.arg_names if re.fullmatch("(q|q_pe|cache)_stride_.*", name))
    options = {"num_warps": 8, "num_stages": tile.num_stages, "enable_fp_fusion": False}
    compiled, said = build_for_hopper(ordered_kernel, ASTSource, types, constants, multiples, **options)
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.shared <= shared_bytes
    assert "wgmma.mma_async instructions are serialized" not in said
    assert "cp.async.cg.shared.global" in ptx
    pending = [int(number, 0) for number in re.findall(r"cp\.async\.wait_group\s+(\w+)", ptx)]
    assert any(pending) == (tile.num_stages == 5)
    if shared_bytes == 232_448:
        assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in ptx


@pytest.mark.parametrize(
    ("q", "cache", "is_ragged", "rows"),
    [
        ("bf16", "bf16", False, "heads"),
        ("bf16", "fp8e4nv", True, "tiled"),
        ("fp16", "u8", False, "tiled"),
    ],
)
def test_the_hopper_kernel_in_a_fixed_order_compiles(q: str, cache: str, is_ragged: bool, rows: str) -> None:
    """Each producer; no product waits for the one before it."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    latent, rope = (f"tensordesc<{q}[64, {width}],{layout}>" for width in (256, 64))
    types = POINTERS | {"lses_ptr": "*fp32", "first_rows_ptr": "*i32", "q_desc": latent, "q_pe_desc": rope}
    types |= {"scale": "fp32", "kv_scale_ptr": "*fp32", "start_ptr": "*i32", "index_ptr": "*i32", "rows_ptr": "*i32"}
    types |= {"kv_desc": latent, "k_pe_desc": rope}
    constants: dict[str, Any] = {"REQS": 32, "IS_CONVERTED": q != cache, "ROW_STRIDE": None}
    constants |= {"ROW_STRIDE": (656 if cache == "u8" else 576) // 4} if q != cache else {}
    absent = ("kv_desc", "k_pe_desc") if q != cache else ("rows_ptr",)
    absent += ("kv_scale_ptr",) if cache != "fp8e4nv" else ()
    absent += () if is_ragged else ("start_ptr", "index_ptr")
    absent += () if rows == "heads" else ("q_token_stride",)
    constants |= dict.fromkeys(absent)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    ptx, said = compile_for_hopper(deterministic_kernel, GluonASTSource, types, constants, **options)
    assert "wgmma.mma_async.sync.aligned.m64n256k16" in ptx
    assert "wgmma.mma_async instructions are serialized" not in said
    assert ("cvt.rn.f16x2.e4m3x2" in ptx) == (q != cache)
    assert_mbarriers_are_apart(ptx)


def test_the_walk_through_quotes_the_code() -> None:
    root = Path(__file__).parents[2]
    document = (root / "docs/kernels.md").read_text()
    section = document[document.index("## The dense decode kernel") : document.index("## Prefill")]
    files = (path.read_text().splitlines() for path in (root / "dcpmla/attention/hopper").glob("*.py"))
    code = "\n".join(line.strip() for lines in files for line in lines)
    excerpts = re.findall(r"```py\n(.*?)```", section, re.DOTALL)  # `python` is for snippets that run
    assert len(excerpts) > 10
    for excerpt in excerpts:
        assert "\n".join(line.strip() for line in excerpt.splitlines()) in code
