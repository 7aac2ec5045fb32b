"""Decode kernels compiled for Hopper, without a GPU."""

from typing import Any

import pytest

triton = pytest.importorskip("triton")


def compile_for_hopper(kernel: Any, source: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> str:
    """PTX of a kernel."""
    from triton.backends.compiler import GPUTarget

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    compiled = triton.compile(source(kernel, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32), options=options)
    return str(compiled.asm["ptx"])


POINTERS = {
    "table_ptr": "*i32",
    "lens_ptr": "*i32",
    "start_ptr": "*i32",
    "lse_ptr": "*fp32",
    "counters_ptr": "*i32",
    "partials_ptr": "*fp32",
}


@pytest.mark.parametrize(
    ("q", "cache", "is_ragged", "is_sent"),
    [
        ("bf16", "bf16", True, False),
        ("bf16", "bf16", False, True),
        ("fp8e4nv", "fp8e4nv", True, False),
        ("fp8e4nv", "fp8e4nv", False, True),
        ("bf16", "fp8e4nv", False, False),
        ("bf16", "u8", False, True),
    ],
)
def test_the_hopper_kernels_compile(q: str, cache: str, is_ragged: bool, is_sent: bool) -> None:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from dcpmla.attention.kernels import mla_decode_hopper, mla_decode_hopper_8bit, mla_decode_hopper_fp8

    is_fp8 = q == "fp8e4nv"
    bits = 8 if is_fp8 else 16

    def tiles(width: int) -> str:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=min(128, width * bits // 8), element_bitwidth=bits, rank=2)
        return f"tensordesc<{q}[64, {width}],{layout}>"

    types = {**POINTERS, "q_desc": tiles(256), "q_pe_desc": tiles(64), "kv_desc": tiles(256), "k_pe_desc": tiles(64)}
    types |= {"out_ptr": "*bf16", "scale": "fp32", "addresses_ptr": "*i64", "state_ptr": "*i32", "cache_ptr": "*i32"}
    types |= {name: "*fp32" for name, dtype in (("q_scale_ptr", q), ("kv_scale_ptr", cache)) if dtype == "fp8e4nv"}
    constants: dict[str, Any] = {"REQS": 32, "IS_RAGGED": is_ragged, "IS_SENT": is_sent}
    constants |= {name: None for name in ("q_scale_ptr", "kv_scale_ptr") if name not in types}
    constants |= {} if q == cache else {"ROW_BYTES": 656 if cache == "u8" else 576}
    kernels = mla_decode_hopper if q == cache else mla_decode_hopper_8bit
    kernel = (mla_decode_hopper_fp8 if is_fp8 else kernels).decode_kernel
    ptx = compile_for_hopper(kernel, GluonASTSource, types, constants, num_warps=4)
    assert ("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3" if is_fp8 else "wgmma.mma_async.sync.aligned.m64n256k16") in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert ("ldmatrix.sync.aligned.m8n8.x4.trans" in ptx) == is_fp8  # what transposes values on their way into registers
    assert ("cvt.rn.f16x2.e4m3x2" in ptx) == (q != cache)


@pytest.mark.parametrize(
    ("rows", "q", "cache"), [(16, "bf16", "bf16"), (64, "bf16", "bf16"), (16, "fp8e4nv", "fp8e4nv"), (16, "bf16", "u8")]
)
def test_the_portable_kernel_compiles(rows: int, q: str, cache: str) -> None:
    from triton.compiler import ASTSource

    from dcpmla.attention.kernels.mla_decode import decode_kernel

    types = {**POINTERS, "q_ptr": f"*{q}", "cache_ptr": f"*{cache}", "out_ptr": "*bf16", "scale": "fp32"}
    types |= {f"{name}_scale_ptr": "*fp32" for name, dtype in (("q", q), ("kv", cache)) if dtype == "fp8e4nv"}
    constants = {"ROWS": rows, "KEYS": 32, "LATENT": 512, "ROPE": 64, "REQS": 32, "IS_RAGGED": True}
    constants |= {name: None for name in ("q_scale_ptr", "kv_scale_ptr") if name not in types}
    assert "sm_90a" in compile_for_hopper(decode_kernel, ASTSource, types, constants, num_warps=4 if rows == 16 else 8)
