"""Empty modules in place of what SGLang imports and a CPU never calls. Python imports this file as each process starts,
also those that SGLang spawns, when its folder is on PYTHONPATH.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

NAMES = os.environ.get("SGLANG_TEST_STUBS", "").split(",")


class Anything:
    """An object that may be called, decorated with, inherited from and asked for any attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, key: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __mro_entries__(self, bases: Any) -> tuple[type]:
        return (object,)


class Stub(types.ModuleType):
    """A module with every name in it, and a few kernels (`kernels.py`)."""

    __path__: list[str] = []
    __version__ = "99.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "sgl_kernel" and name.endswith("_cpu"):
            return getattr(importlib.import_module("tests.engines.sglang_cpu.kernels"), name, Anything())
        return Anything()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that are to be stubs, and all below them."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname.split(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, Finder())
