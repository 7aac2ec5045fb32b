import logging
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcpmla.runtime import compilations

knobs = pytest.importorskip("triton.knobs")
from triton.runtime._async_compile import AsyncCompileMode, active_mode  # noqa: E402, after the check
from triton.runtime.jit import JITFunction  # noqa: E402


def test_kernels_are_named_until_the_next_engine_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    """As Triton calls its hook."""
    facts = {"key": "k", "repr": "place_kernel[num_warps=4](rows_ptr: *bf16)", "compile": {}, "is_manual_warmup": False}
    facts["fn"] = SimpleNamespace(module="dcpmla.comm.kernels.window", name="place_kernel")
    try:
        first = compilations.watch()
        with caplog.at_level(logging.WARNING):
            knobs.runtime.jit_post_compile_hook(**facts, already_compiled=False)
        assert "dcpmla.comm.kernels.window.place_kernel[num_warps=4](rows_ptr: *bf16)" in caplog.text
        second = compilations.watch()
        knobs.runtime.jit_post_compile_hook(**facts, already_compiled=False)
    finally:
        compilations.end_watch()
    assert first == second == ["dcpmla.comm.kernels.window.place_kernel"]
    assert knobs.runtime.jit_post_compile_hook is None


class Kernel(int):
    """A kernel that is a number. Triton's kernels have a hash once they are in its cache."""

    fn, hash = Any, None


class Compiler:
    """In place of Triton's: threads of the active mode compile kernels."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.compiled: list[int] = []
        self.launched: list[int] = []
        self._asked: dict[int, Any] = {}
        self.keys: dict[int, str | None] = {}
        patch.setattr(JITFunction, "run", lambda kernel, *args, **options: self._run(kernel, *args, **options))

    def launch(self, number: int, function: Any = Any) -> None:
        kernel = Kernel(number)
        kernel.fn = function
        JITFunction.run(kernel, "argument", grid=(1,), warmup=False)

    def _run(self, kernel: Kernel, argument: str, grid: Any, warmup: bool) -> Any:
        assert argument == "argument"
        self.keys[kernel] = kernel.hash
        if not warmup:
            assert active_mode.get() is None, "a thread would compile it later"
            self.launched.append(kernel)
        elif kernel not in self._asked:
            mode = active_mode.get()
            assert mode is not None
            # Triton's versions have one or two
            hooks = [lambda *_: None] * (len(signature(AsyncCompileMode.submit).parameters) - 3)
            self._asked[kernel] = mode.submit(str(kernel), lambda: self._compile(kernel), *hooks)
        return self._asked.get(kernel)

    def _compile(self, kernel: int) -> None:
        if kernel < 0:
            raise ArithmeticError("no registers left")
        self.compiled.append(kernel)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rehearsal_compiles_a_share_of_the_kernels_before_ranks_meet(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, met = Compiler(monkeypatch), list[list[int]]()
    num_asked = []
    with compilations.rehearsal(rank, 3, lambda: met.append(sorted(compiler.compiled))) as asked:
        for kernel in (0, 1, 1, 2, 3, 4, 5, 6):
            compiler.launch(kernel)
            num_asked.append(len(asked))
        assert torch.empty(8, dtype=torch.int64).tolist() == [0] * 8
        assert torch.empty_like(torch.ones(8)).tolist() == torch.ones(1).new_empty(8).tolist() == [0] * 8
    assert num_asked == [1, 2, 2, 3, 4, 5, 6, 7]
    assert met == [[kernel for kernel in range(7) if kernel % 3 == rank]]
    assert sorted(compiler.compiled) == [*range(7)]
    assert not compiler.launched
    compiler.launch(7)
    assert compiler.launched == [7]
    assert compiler.keys[0]
    assert compiler.keys[7] is None, "it is first launched later, and keeps Triton's key"
    assert "new_empty" not in vars(torch.Tensor)
    assert torch.empty is not torch.zeros


@pytest.mark.parametrize("rank", [0, 1])
def test_the_numbers_of_a_step_are_written(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank: operations compute indices from them."""
    from dcpmla.attention.step.kernels import layout_kernel

    compiler = Compiler(monkeypatch)
    with compilations.rehearsal(rank, 2, lambda: None):
        compiler.launch(0)
        compiler.launch(1, layout_kernel.fn)
        assert compiler.launched == [1]
        compiler.launch(2)
    assert compiler.launched == [1]
    assert sorted(compiler.compiled) == [0, 2]


def test_a_kernel_that_does_not_compile_fails_where_it_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(monkeypatch)
    with compilations.rehearsal(0, 2, lambda: None):
        for kernel in (-1, -2, 1, 2):
            compiler.launch(kernel)
    assert sorted(compiler.compiled) == [1, 2]


def test_a_rehearsal_that_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(monkeypatch)

    def rehearse() -> None:
        with compilations.rehearsal(0, 2, lambda: None):
            compiler.launch(0)
            compiler.launch(1)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        rehearse()
    compiler.launch(5)
    assert compiler.launched == [5]
