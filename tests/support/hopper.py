"""Compilation for Hopper, without a GPU; unchanged kernels come from Triton's cache on disk."""

import contextlib
import hashlib
import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import dcpmla

_LOG = "ptxas.log"


def new_source(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], multiples: str = "", source: Any = None
) -> Any:
    """Return the source of a kernel as it is launched: with pointers to multiples of 16 bytes.

    Args:
        types: Types of arguments by name; the others are int32.
        multiples: A pattern of the names of integers that are multiples of 16, too.
        source: Class of the source; None for Triton's own, which Gluon's kernels do not have.
    """
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    attributes = {
        (at,): [["tt.divisibility", 16]]
        for at, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (kind == "i32" and multiples and re.search(multiples, name))
    }
    return (source or ASTSource)(kernel, signature, constexprs=constants, attrs=attributes)


def compile_for_hopper(
    kernel: Any, source: Any, types: dict[str, str], constants: dict[str, Any], **options: int
) -> tuple[str, str]:
    """Return the PTX of a kernel, and what the assembler says of it."""
    compiled, said = build_for_hopper(kernel, source, types, constants, (), **options)
    return str(compiled.asm["ptx"]), said


def build_for_hopper(
    kernel: Any,
    source: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    multiples: tuple[str, ...],
    **options: int,
) -> tuple[Any, str]:
    """Return a compiled kernel, and what the assembler says of it. multiples: Integers that are multiples of 16."""
    pattern = f"^({'|'.join(multiples)})$" if multiples else ""
    return compile_with_log(new_source(kernel, types, constants, pattern, source), options)


def ptx_for_hopper(kernel: Any, dtype: str, constants: dict[str, Any], multiples: str = "stride", **types: str) -> str:
    """Return the PTX of a kernel whose pointers, without another type, are to dtype."""
    pointers = {name: f"*{dtype}" for name in kernel.arg_names if name.endswith("_ptr")}
    ptx = str(compile_source(new_source(kernel, {**pointers, **types}, constants, multiples)).asm["ptx"])
    assert "sm_90a" in ptx
    return ptx


def compile_source(source: Any, options: dict[str, Any] | None = None) -> Any:
    """Compile a kernel's source without line numbers, which take a sixth of the time and affect no instruction."""
    import triton
    from triton.backends.compiler import GPUTarget

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert not overwritten_products(compiled.asm["ttgir"]), compiled.metadata.name
    return compiled


def overwritten_products(ttgir: str) -> list[str]:
    """Return the left sides of products in loops that may still be read when the next step writes them.

    Triton lets a `wgmma` run on after its step. If its left side is in registers, the next step may compute them only
    after a wait for that product. A wait is for all products but the last `pendings`.
    """
    loops = re.finditer(r"(?m)^( *)(?=\S.*(?:scf\.for|scf\.while|\} do) .*\n((?:\1 .*\n)*))", ttgir)
    return [name for loop in loops for name in _overwritten(loop[2].splitlines())]


def _overwritten(body: list[str]) -> list[str]:
    """Return the left sides of a loop's products that its next step overwrites too early."""
    made = {found[1]: at for at, line in enumerate(body) if (found := re.match(r" *(%\w+)(?::\d+)? = ", line))}
    waits = [(at, int(found[1])) for at, line in enumerate(body) if (found := re.search(r"pendings = (\d+)", line))]
    products = [at for at, line in enumerate(body) if "ttng.warp_group_dot " in line]
    overwritten = []
    for at in products:
        found = re.search(r"warp_group_dot (%\w+).*isAsync = true.* : tensor", body[at])
        if found is None:  # waited for by itself, or both sides are in shared memory
            continue
        later = sum(other > at for other in products)
        in_step = any(wait > at and left <= sum(at < other < wait for other in products) for wait, left in waits)
        free = [wait for wait, left in waits if wait < at and left <= later + sum(other < wait for other in products)]
        if not in_step and not (free and made.get(found[1], -1) > free[0]):
            overwritten.append(found[1])
    return overwritten


def compile_with_log(source: Any, options: dict[str, Any]) -> tuple[Any, str]:
    """Compile a kernel, unless the package is as it was at the last time; return it with its assembler's log.

    The log lies beside the kernel in Triton's cache.
    """
    import triton
    from triton.runtime.cache import get_cache_manager

    log = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = compile_source(source, options)
        files = get_cache_manager(compiled.hash)
        path = files.get_file(_LOG)
        digest, _, kept = Path(path).read_text().partition("\n") if path else ("", "", "")
        if not log.getvalue() and digest != _digest():
            triton.knobs.compilation.always_compile = True
            compiled = compile_source(source, options)
    if log.getvalue():
        files.put(f"{_digest()}\n{log.getvalue()}", _LOG)
    return compiled, log.getvalue() or kept


@cache
def _digest() -> str:
    """Digest the package's code: Triton's key of a kernel lacks constants that it reads from another module."""
    paths = sorted(Path(dcpmla.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
