"""The kernels of prefill compiled for Hopper, and tiles that fit in shared memory."""

from typing import Any

import pytest
import triton
from triton.experimental.gluon._runtime import GluonASTSource

from dcpmla.attention.hopper.deterministic_prefill import deterministic_prefill_kernel
from dcpmla.attention.hopper.prefill import prefill_kernel
from dcpmla.attention.hopper.prefill_pipeline import KEYS, NOPE, ROPE, ROWS, TILE, VALUE
from dcpmla.attention.triton.merge import merge_part_kernel
from dcpmla.attention.triton.prefill import TILINGS, mha_prefill_kernel, select_tiling
from tests.attention.test_decode_compile import assert_mbarriers_are_apart
from tests.support.hopper import compile_for_hopper, compile_source, new_source, ptx_for_hopper

HOPPER_SHARED_MEMORY = 232448  # bytes that a program may use


@pytest.mark.parametrize(
    ("dims", "causal", "has_mask"),
    [
        ((128, 64, 128), True, False),
        ((192, 64, 256), True, True),
        ((192, 64, 128), False, True),
        ((48, 16, 32), False, False),
    ],
)
def test_mha_prefill_compiles_for_hopper(dims: tuple[int, int, int], causal: bool, has_mask: bool) -> None:
    """With the tiles that such heads get, within a program's shared memory."""
    tile_dims = [max(16, triton.next_power_of_2(dim)) for dim in dims]
    tiling = select_tiling(tile_dims[0] + tile_dims[1], tile_dims[2], HOPPER_SHARED_MEMORY)
    constants: dict[str, int | None] = dict(
        zip(("P", "R", "V", "P_TILE", "R_TILE", "V_TILE"), (*dims, *tile_dims), strict=True)
    )
    constants |= {"CAUSAL": causal, "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n}
    if not has_mask:
        constants |= {"mask_ptr": None, "num_words": None}
    if not (causal and has_mask):
        constants["window"] = None
    types = {
        "scale_log2": "fp32",
        "lse_ptr": "*fp32",
        "query_start_loc_ptr": "*i32",
        "key_start_loc_ptr": "*i32",
        "mask_ptr": "*i32",
    }
    types |= {"q_ptr": "*bf16", "out_ptr": "*bf16", "k_pe_desc": f"tensordesc<bf16[{tiling.block_n}, {tile_dims[1]}]>"}
    types |= {
        name: f"tensordesc<bf16[1, {tiling.block_n}, {dim}]>"
        for name, dim in (("k_nope_desc", tile_dims[0]), ("v_desc", tile_dims[2]))
    }
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    compiled = compile_source(new_source(mha_prefill_kernel, types, constants, "stride"), options)
    assert "wgmma" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= HOPPER_SHARED_MEMORY


def rows_in_tiles(dtype: str) -> dict[str, str]:
    """Return the types of the Hopper kernels' rows, which move in tiles, and of their output and scale."""
    sizes = {"q_nope": (ROWS, NOPE), "q_pe": (ROWS, ROPE), "v": (KEYS, VALUE), "k_nope": (KEYS, NOPE)}
    tiles = {
        f"{name}_desc": f"tensordesc<{dtype}[{num_rows.value}, {num_columns.value}],{TILE.value}>"
        for name, (num_rows, num_columns) in (sizes | {"k_pe": (KEYS, ROPE)}).items()
    }
    return {**tiles, "out_ptr": f"*{dtype}", "scale_log2": "fp32"}


def assert_products_overlap(ptx: str, said: str) -> None:
    """Check that no product waits for the one before it, and that registers and mbarriers have their own memory."""
    assert "wgmma.mma_async.sync.aligned.m64n128k16" in ptx
    assert "wgmma.mma_async instructions are serialized" not in said
    assert "0 bytes spill stores" in said
    assert_mbarriers_are_apart(ptx)


@pytest.mark.parametrize(
    ("dtype", "causal", "has_mask", "has_window"),
    [
        ("bf16", True, False, False),
        ("bf16", False, True, False),
        ("bf16", True, True, True),
        ("fp16", False, False, False),
        ("fp16", True, True, False),
    ],
)
def test_the_hopper_kernel_compiles(dtype: str, causal: bool, has_mask: bool, has_window: bool) -> None:
    """The softmax of a tile precedes the wait for the product of the values of the tile before. Before the softmax each
    score is tested by itself, and each thread loads the words of its two rows for the next tile.
    """
    types = {**rows_in_tiles(dtype), "lse_ptr": "*fp32", "query_start_loc_ptr": "*i32", "key_start_loc_ptr": "*i32"}
    constants: dict[str, Any] = {"IS_CAUSAL": causal}
    if has_mask:
        types["mask_ptr"] = "*i32"
    else:
        constants |= {"mask_ptr": None, "num_words": None}
    if not has_window:
        constants["window"] = None
    ptx, said = compile_for_hopper(prefill_kernel, GluonASTSource, types, constants, num_warps=4)
    assert_products_overlap(ptx, said)
    assert "cp.async.bulk.tensor" in ptx
    loop = ptx[ptx.index("wgmma.wait_group.sync.aligned 1") :]
    softmax = loop[: loop.index("wgmma.wait_group.sync.aligned 0")]
    assert softmax.count("ex2.approx") >= 64
    assert softmax.count("selp.f32") == (64 if has_mask else 0)
    assert softmax.count("ld.global") == (8 if has_mask else 0)
    assert "mbarrier.try_wait" in softmax[softmax.rindex("ex2.approx") :]  # past which the assembler moves no wait


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_hopper_kernel_in_a_fixed_order_compiles(dtype: str) -> None:
    """No product waits for the one before it."""
    types = rows_in_tiles(dtype) | {f"{name}_ptr": "*fp32" for name in ("lse", "acc", "peak", "total")}
    types |= {f"{name}_ptr": "*i32" for name in ("query_start", "query_position", "key_start", "key_position")}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    assert_products_overlap(*compile_for_hopper(deterministic_prefill_kernel, GluonASTSource, types, {}, **options))


def test_merge_part_compiles_for_hopper() -> None:
    types = {"merged_ptr": "*bf16", "part_ptr": "*bf16"}
    ptx_for_hopper(merge_part_kernel, "fp32", {"WIDTH": 128, "COLUMNS": 128, "ROWS": 32}, **types)


def test_tilings_fit() -> None:
    """Each takes less than the one before; heads of up to 256 find one in the 99 KiB of small GPUs, DeepSeek's the best
    one on Hopper.
    """
    sizes = [tiling.shared_memory(192, 128) for tiling in TILINGS]
    assert sizes == sorted(sizes, reverse=True)
    assert select_tiling(192, 128, HOPPER_SHARED_MEMORY) == TILINGS[0]
    assert select_tiling(320, 256, 101376).shared_memory(320, 256) <= 101376
