"""Assembler in Triton's interpreter, which refuses it: the instructions of packed weights, on NumPy's arrays.

Source: NVIDIA's PTX ISA.
"""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def _arithmetic(dtype: torch.dtype, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """Return an instruction on two values of a dtype in each register."""

    def values(register: Any) -> torch.Tensor:
        return torch.from_numpy(register.view(np.uint16).copy()).view(dtype).float()

    return lambda a, b: compute(values(a), values(b)).to(dtype).view(torch.uint16).numpy().view(np.uint32)


def _permute(a: Any, b: Any, selector: Any) -> Any:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(a)
    for byte in range(4):
        chosen = (int(selector[0]) >> (4 * byte)) & 7
        result |= ((both >> np.uint64(8 * chosen)) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * byte)
    return result


def _logic(a: Any, b: Any, c: Any, table: Any) -> Any:
    result = np.zeros_like(a)
    for bits in range(8):  # of a, b and c
        if int(table[0]) >> bits & 1:
            result |= (a if bits & 4 else ~a) & (b if bits & 2 else ~b) & (c if bits & 1 else ~c)
    return result


_INSTRUCTIONS = {
    "prmt.b32": _permute,
    "lop3.b32": _logic,
    "shr.b32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "and.b32": lambda a, b: a & b,
    "mov.b32": lambda a: a,
    "add.u32": lambda a, b: a + b,
    "mul.lo.u32": lambda a, b: a * b,
    "mul.rn.bf16x2": _arithmetic(torch.bfloat16, torch.mul),
    "sub.rn.bf16x2": _arithmetic(torch.bfloat16, torch.sub),
    "mul.rn.f16x2": _arithmetic(torch.float16, torch.mul),
    "sub.rn.f16x2": _arithmetic(torch.float16, torch.sub),
}


def run(text: str, inputs: list[Any], num_outputs: int) -> list[Any]:
    """Return the output registers $0, $1, .. of a text, after which inputs are numbered, uint32 arrays."""
    registers = {f"${number + num_outputs}": value for number, value in enumerate(inputs)}

    def value_of(name: str) -> Any:
        return registers[name] if name in registers else np.full_like(inputs[0], int(name, 0))

    for line in filter(None, map(str.strip, text.strip("{}").split(";"))):
        name, _, rest = line.partition(" ")
        if name != ".reg":
            target, *sources = re.split(r",\s*", rest)
            registers[target] = _INSTRUCTIONS[name](*map(value_of, sources))
    return [registers[f"${number}"] for number in range(num_outputs)]


def interpret_assembler() -> None:
    """Make this process interpret assembler from now on."""

    def create(_: Any, text: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int) -> Any:
        if not text:
            return SimpleNamespace(get_result=lambda index: values[index])
        shape, inputs = values[0].data.shape, []
        for value in values:
            words = np.ascontiguousarray(value.data).reshape(-1, pack).view(np.uint32)
            inputs += [np.ascontiguousarray(words[:, number]) for number in range(words.shape[1])]
        outputs = run(text, inputs, constraints.count("="))
        each = len(outputs) // len(types)
        results = [
            np.stack(outputs[each * at : each * (at + 1)], 1).view(f"u{kind.scalar.primitive_bitwidth // 8}")
            for at, kind in enumerate(types)
        ]
        handles = [
            # The interpreter holds bfloat16 as its bits.
            interpreter.TensorHandle(
                (result.view(np.float16) if kind.scalar == tl.float16 else result).reshape(shape), kind.scalar
            )
            for result, kind in zip(results, types, strict=True)
        ]
        return SimpleNamespace(get_result=handles.__getitem__)

    interpreter.InterpreterBuilder.create_inline_asm = create
