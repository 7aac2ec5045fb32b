"""Decode kernels compiled for Hopper, without a GPU."""

import contextlib
import io
from typing import Any

import pytest

triton = pytest.importorskip("triton")


def compile_for_hopper(
    kernel: Any, source: Any, types: dict[str, str], constants: dict[str, Any], **options: int
) -> tuple[str, str]:
    """PTX of a kernel, and what the assembler says of it."""
    from triton.backends.compiler import GPUTarget

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    pointers = (index for index, name in enumerate(kernel.arg_names) if signature[name].startswith("*"))
    attrs = {(index,): [["tt.divisibility", 16]] for index in pointers}  # as they are launched
    said = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
        built = source(kernel, signature, constexprs=constants, attrs=attrs)
        compiled = triton.compile(built, target=GPUTarget("cuda", 90, 32), options=options)
    return str(compiled.asm["ptx"]), said.getvalue()


POINTERS = {
    "table_ptr": "*i32",
    "lens_ptr": "*i32",
    "start_ptr": "*i32",
    "lse_ptr": "*fp32",
    "counters_ptr": "*i32",
    "partials_ptr": "*fp32",
}


@pytest.mark.parametrize(
    ("q", "cache", "is_sparse", "is_ragged", "is_sent"),
    [
        ("bf16", "bf16", False, True, True),
        ("bf16", "bf16", True, False, False),
        ("fp8e4nv", "fp8e4nv", False, True, True),
        ("bf16", "fp8e4nv", False, False, False),
        ("bf16", "u8", True, False, True),
    ],
)
def test_the_hopper_kernels_compile(q: str, cache: str, is_sparse: bool, is_ragged: bool, is_sent: bool) -> None:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from dcpmla.attention.hopper import decode as mla_decode_hopper
    from dcpmla.attention.hopper import decode_8bit as mla_decode_hopper_8bit
    from dcpmla.attention.hopper import decode_fp8 as mla_decode_hopper_fp8
    from dcpmla.attention.hopper import decode_sparse as mla_decode_hopper_sparse

    is_fp8, is_converted = q == "fp8e4nv", q != cache
    bits = 8 if is_fp8 else 16

    def tiles(width: int) -> str:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=min(128, width * bits // 8), element_bitwidth=bits, rank=2)
        return f"tensordesc<{q}[64, {width}],{layout}>"

    types = {**POINTERS, "q_desc": tiles(256), "q_pe_desc": tiles(64), "kv_desc": tiles(256), "k_pe_desc": tiles(64)}
    types |= {"out_ptr": "*bf16", "scale": "fp32", "addresses_ptr": "*i64", "state_ptr": "*i32"}
    types |= {"cache_ptr": "*i32" if is_converted else f"*{cache}"}
    types |= {name: "*fp32" for name, dtype in (("q_scale_ptr", q), ("kv_scale_ptr", cache)) if dtype == "fp8e4nv"}
    constants: dict[str, Any] = {"REQS": 32, "IS_RAGGED": is_ragged, "IS_SENT": is_sent}
    constants |= {name: None for name in ("q_scale_ptr", "kv_scale_ptr") if name not in types}
    if is_converted:
        constants |= {"ROW_BYTES": 656 if cache == "u8" else 576, "IS_SPARSE": is_sparse}
    elif is_sparse:
        constants |= {"ROW_WIDTH": 576}
    halves = mla_decode_hopper_sparse if is_sparse else mla_decode_hopper
    module = mla_decode_hopper_8bit if is_converted else mla_decode_hopper_fp8 if is_fp8 else halves
    ptx, said = compile_for_hopper(module.decode_kernel, GluonASTSource, types, constants, num_warps=4)
    assert (
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3" if is_fp8 else "wgmma.mma_async.sync.aligned.m64n256k16"
    ) in ptx
    assert "bytes stack frame" in said
    assert (
        "wgmma.mma_async instructions are serialized" not in said
    )  # as in too few registers, where each waits for the one before
    assert "cp.async.bulk.tensor" in ptx
    assert (
        "ldmatrix.sync.aligned.m8n8.x4.trans" in ptx
    ) == is_fp8  # what transposes values on their way into registers
    assert ("cp.async.cg.shared.global" in ptx) == (is_sparse and not is_converted)
    assert ("cvt.rn.f16x2.e4m3x2" in ptx) == is_converted


@pytest.mark.parametrize(("rows", "q", "cache"), [(64, "bf16", "bf16"), (16, "fp8e4nv", "fp8e4nv"), (16, "bf16", "u8")])
def test_the_portable_kernel_compiles(rows: int, q: str, cache: str) -> None:
    from triton.compiler import ASTSource

    from dcpmla.attention.triton.decode import decode_kernel

    types = {**POINTERS, "q_ptr": f"*{q}", "cache_ptr": f"*{cache}", "out_ptr": "*bf16", "scale": "fp32"}
    types |= {f"{name}_scale_ptr": "*fp32" for name, dtype in (("q", q), ("kv", cache)) if dtype == "fp8e4nv"}
    constants = {"ROWS": rows, "KEYS": 32, "LATENT": 512, "ROPE": 64, "REQS": 32, "IS_RAGGED": True}
    constants |= {name: None for name in ("q_scale_ptr", "kv_scale_ptr") if name not in types}
    ptx, _ = compile_for_hopper(decode_kernel, ASTSource, types, constants, num_warps=4 if rows == 16 else 8)
    assert "sm_90a" in ptx
