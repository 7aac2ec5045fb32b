"""One name each for parts of Gluon that Triton 3.6 and later versions name differently."""

from typing import Any, TypeVar, dataclass_transform

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


Struct = TypeVar("Struct")


@dataclass_transform()
def aggregate(cls: type[Struct]) -> type[Struct]:
    """Make a class of annotated fields a struct of kernel values; its constructor takes them in order or by name.

    Triton 3.6 asks each class for a constructor of its own, later versions make one.
    """
    fields = tuple(cls.__annotations__)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in [*zip(fields, args, strict=False), *kwargs.items()]:
            setattr(self, name, core.constexpr(None) if value is None else value)

    init.__triton_builtin__ = True  # type: ignore[attr-defined]  # kernels may refer to it
    cls.__init__ = init  # type: ignore[method-assign]
    return core._aggregate(cls)
