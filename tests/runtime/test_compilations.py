import logging
from types import SimpleNamespace

import pytest

from dcpmla.runtime import compilations

knobs = pytest.importorskip("triton.knobs")


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
