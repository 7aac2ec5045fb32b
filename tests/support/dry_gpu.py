"""A GPU on paper: tensors with shapes, strides and addresses but no elements, and a record of the kernels that are
launched over them.

The package runs as on a Hopper GPU, rank 0 of a job whose other ranks are imagined: the same choices of kernels, the
same launches with the same arguments, in a thousandth of the time. What comes back to the host is zero.
"""

import contextlib
import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from dcpmla.operators import Operator
from dcpmla.runtime.agreement import Agreement

GPU, _META = torch.device("cuda", 0), torch.device("meta")
_ADDRESS = 1 << 40  # a multiple of all alignments, as the allocator's
_SHARED_MEMORY = 232_448
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H200", multi_processor_count=132, major=9, minor=0, shared_memory_per_block_optin=_SHARED_MEMORY
)
_aten = torch.ops.aten
_READS = (_aten.item.default, _aten._local_scalar_dense.default, _aten.is_nonzero.default)
Key = tuple[tuple[str, str], ...]
_done: list[Any] = []  # work of a collective of the host
_known: dict[Any, Any] = {}  # results by the operator and the sizes of its arguments, as `_results_of` returns them


class _Sizes(NamedTuple):
    """Shape, strides, offset and dtype of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Return the sizes of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)


class PaperTensor(Tensor):
    """A tensor of the GPU.

    Attributes:
        number: Number that it was made from on the host, if it has one element; None for others.
    """

    number: float | None

    @staticmethod
    def __new__(cls, sizes: _Sizes, number: float | None = None) -> "PaperTensor":
        shape, stride, offset, dtype = sizes
        made: PaperTensor = Tensor._make_wrapper_subclass(cls, shape, stride, offset, dtype=dtype, device=GPU)
        made.number = number
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return _ADDRESS + int(self.storage_offset()) * self.element_size()

    def record_stream(self, stream: object) -> None:
        """Hold no memory back: there is none."""


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator: find the sizes of its results, which follow from its arguments."""
    if func in _READS:
        number = args[0].number
        return torch.zeros((), dtype=args[0].dtype).item() if number is None else number
    if func is _aten.equal.default:
        return False
    if func is _aten.copy_.default and not isinstance(args[0], PaperTensor):
        return args[0].zero_()
    if func.namespace == "c10d":
        return _communicate(func, args)
    tensors: list[Tensor] = []
    try:
        key = func, _key_of(args, tensors), _key_of(tuple(kwargs.items()), tensors)
        results = _known.get(key)
    except TypeError:  # an argument without a hash
        key, results = None, None
    if results is None:
        results = _results_of(func, args, kwargs)
        if key is not None:
            _known[key] = results
    device = args[1] if func is _aten.to.device else kwargs.get("device")
    is_read = device is not None and torch.device(device).type == "cpu"
    number = None
    if tensors and tensors[0].numel() == 1 and not any(type(each) is PaperTensor for each in tensors):
        number = tensors[0].item()

    def made(result: Any) -> Any:
        if type(result) is int:
            return tensors[result]
        if type(result) is _Sizes:
            shape, stride, _, dtype = result
            return torch.empty_strided(shape, stride, dtype=dtype).zero_() if is_read else PaperTensor(result, number)
        return _mapped(made, result)

    return made(results)


def _results_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what an operator returns: sizes in the place of a tensor; if that is an argument, its number among those
    that are tensors.
    """
    numbers: dict[int, int] = {}
    metas: list[Tensor] = []

    def to_meta(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return _mapped(to_meta, value)
        size = sum((length - 1) * stride for length, stride in zip(value.shape, value.stride(), strict=True))
        memory = torch.empty(max(0, size) + value.storage_offset() + 1, dtype=value.dtype, device=_META)
        metas.append(memory.as_strided(value.shape, value.stride(), value.storage_offset()))
        if isinstance(value, PaperTensor):
            numbers[id(metas[-1])] = len(metas) - 1
        return metas[-1]

    def to_sizes(value: Any) -> Any:
        if isinstance(value, Tensor):
            return numbers[id(value)] if id(value) in numbers else _Sizes.of(value)
        return _mapped(to_sizes, value)

    inner = [to_meta(value) for value in args]
    others = {name: to_meta(value) for name, value in kwargs.items() if name != "pin_memory"}
    if "generator" in others:
        others["generator"] = None
    if kwargs.get("device") is not None:
        others["device"] = _META
    if func is _aten.to.device:
        inner[1] = _META
    return to_sizes(func(*inner, **others))


def _key_of(values: Iterable[Any], tensors: list[Tensor]) -> tuple[Any, ...]:
    """Return a key of arguments: sizes of tensors, which are appended to `tensors`, other values themselves."""
    key: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            sizes = value.shape, value.stride(), value.storage_offset(), value.dtype
            key.append((sizes, type(value) is PaperTensor))
        elif isinstance(value, list | tuple):
            key.append(_key_of(value, tensors))
        else:
            key.append((type(value), value))
    return tuple(key)


def _communicate(func: Any, args: Any) -> Any:
    """Return what a collective returns: its first tensors, and its work, which is done."""
    results = tuple(_done[0] if str(each.type).endswith("Work") else args[0] for each in func._schema.returns)
    return results[0] if len(results) == 1 else results


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    return type(value)(map(function, value)) if type(value) in (list, tuple) else value


class _Paper(TorchDispatchMode):
    """Tensors that are made on the GPU are `PaperTensor`s; the host's memory is not pinned."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing is compiled here, and torch's guard takes as long as an operator.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.is_pinned.default:
            return False
        if func is _aten._pin_memory.default:
            return args[0]
        if "pin_memory" in kwargs:
            kwargs = kwargs | {"pin_memory": False}
        device = args[1] if func is _aten.to.device else kwargs.get("device")
        is_made = device is not None and torch.device(device).type == "cuda"
        if is_made or any(issubclass(kind, PaperTensor) for kind in types):
            return _run(func, args, kwargs)
        results = func(*args, **kwargs)
        if func.namespace == "c10d":
            _done[:] = [results[-1] if isinstance(results, tuple) else results]
        return results


class _Stream:
    """A stream, event or graph: what is queued on it is done."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        results = {"query": True, "record_event": self, "elapsed_time": 1.0}
        return lambda *_, **__: results.get(name)


class _SameThread(contextlib.nullcontext[Any]):
    """An executor without threads, which would have no paper."""

    def __enter__(self) -> "_SameThread":
        return self

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_result(function(*args))
        return future


class Launches:
    """The kernels that were launched, not only compiled, and the variants of each that Triton would compile.

    Attributes:
        keys: Variants by the kernel's name: of each parameter its type and what Triton specializes it for.
    """

    def __init__(self) -> None:
        self.keys: dict[str, set[Key]] = defaultdict(set)

    def record(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> tuple[str, Key]:
        """Take the place of a launch or compilation (`JITFunction.run`); return the kernel's variant."""
        values = dict(zip((parameter.name for parameter in kernel.params), args, strict=False)) | options
        names = {parameter.name: parameter for parameter in kernel.params}
        key = tuple((name, str(_specialized(names.get(name), value))) for name, value in sorted(values.items()))
        name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
        if not warmup:
            self.keys[name].add(key)
        return name, key

    def copy(self) -> dict[str, set[Key]]:
        """Return the variants so far."""
        return {name: set(keys) for name, keys in self.keys.items()}

    def new_since(self, before: Mapping[str, set[Key]]) -> list[str]:
        """Describe the variants that have come since, each by its difference from the most similar one."""
        lines = []
        for name, keys in self.keys.items():
            known = before.get(name, set())
            for key in sorted(keys - known):
                nearest = max(known, key=lambda other: len(set(other) & set(key)), default=())
                lines.append(f"{name}: {dict(set(key) - set(nearest))}, not {dict(set(nearest) - set(key))}")
        return lines


def _specialized(parameter: Any, value: Any) -> Any:
    """Return what Triton compiles a variant for: values of constants and options, types, 1, multiples of 16.

    Source: Triton's `triton.jit`, do_not_specialize and do_not_specialize_on_alignment.
    """
    if parameter is None or parameter.is_constexpr or value is None:
        return value
    is_any = parameter.do_not_specialize
    is_unaligned = is_any or parameter.do_not_specialize_on_alignment
    if isinstance(value, Tensor):
        return value.dtype, is_unaligned or value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        kind = "i32" if -(2**31) <= value < 2**31 else "i64"
        return kind if is_any else (kind, value == 1, is_unaligned or value % 16 == 0)
    if hasattr(value, "block_shape"):  # a descriptor of a tensor
        return type(value).__name__, value.base.dtype, value.block_shape
    if isinstance(value, tuple):
        return tuple(_specialized(parameter, each) for each in value)
    return type(value).__name__


@contextlib.contextmanager
def paper_gpu(num_ranks: int) -> Iterator[Launches]:
    """Make this process rank 0 of a job whose GPUs, Hoppers, are on paper; yield the record of their kernels."""
    launches = Launches()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), _device_guard(), _lifted_on_host():
        for module, names in _stand_ins(num_ranks).items():
            for name, stand_in in names.items():
                patch.setattr(module, name, stand_in)
        patch.setattr(JITFunction, "run", lambda kernel, *args, **options: launches.record(kernel, *args, **options))
        patch.setattr(Operator, "__call__", Operator._run)
        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
        try:
            with _Paper():
                yield launches
        finally:
            dist.destroy_process_group()


def _stand_ins(num_ranks: int) -> dict[Any, dict[str, Any]]:
    """Return what takes the place of a GPU's driver, by the modules or classes that have it."""
    import dcpmla.attention.triton.device as device
    import dcpmla.cache.layers as layers
    import dcpmla.comm.select as select
    import dcpmla.model.moe as moe
    import dcpmla.runtime.capture as capture

    class HostGenerator(torch.Generator):
        def __new__(cls, _: object = None) -> "HostGenerator":
            return super().__new__(cls)

    def returning(value: Any, *names: str) -> dict[str, Any]:
        """Return functions of their own: torch.compile's rules list torch's by their identities."""
        return {name: lambda *_, **__: value for name in names}

    cuda = returning(None, "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "set_sync_debug_mode")
    cuda |= returning(0, "current_device", "memory_allocated", "max_memory_allocated", "get_sync_debug_mode")
    cuda |= returning(contextlib.nullcontext(), "stream", "device")
    cuda |= returning(_Stream(), "current_stream", "default_stream")
    cuda |= returning(True, "is_available", "is_initialized") | returning(False, "is_current_stream_capturing")
    cuda |= returning((9, 0), "get_device_capability") | returning(_PROPERTIES, "get_device_properties")
    cuda |= returning((100 << 30, 140 << 30), "mem_get_info") | returning((0, 0), "graph_pool_handle")
    cuda |= returning(num_ranks, "device_count") | returning(_PROPERTIES.name, "get_device_name")
    host_memory = SimpleNamespace(**returning(0, "cudaHostRegister", "cudaHostUnregister"))
    cuda |= returning(host_memory, "cudart")
    cuda |= dict.fromkeys(("Stream", "Event", "CUDAGraph"), _Stream)
    memory = SimpleNamespace(buffer_ptrs=[_ADDRESS] * num_ranks)
    symmetric = {
        "empty": lambda num, dtype, device: torch.empty(num, dtype=dtype, device=device),
        "rendezvous": lambda *_: memory,
    }
    read = Agreement.read

    def read_with_time(agreement: Agreement, message: Any, words: Sequence[int]) -> Any:
        return read(agreement, message, [*words[:3], 1, *words[4:]])  # a step takes a microsecond

    return {
        Agreement: {"read": read_with_time},
        torch.cuda: cuda,
        torch.version: {"cuda": "13.0"},
        torch: {"Generator": HostGenerator},
        torch.inference_mode: returning(None, "__enter__", "__exit__"),  # its tensors cannot wrap others
        symmetric_memory: symmetric,
        dist: {"get_backend": lambda _=None: "gloo"},
        select: {"reach": lambda *_: ""},
        device: {"max_shared_mem": lambda _: _SHARED_MEMORY},
        layers: {"host_tensor": layers.zeros},
        moe: {"ThreadPoolExecutor": _SameThread},
        capture: {"_alias": lambda tensor: tensor},
    }


@contextlib.contextmanager
def _device_guard() -> Iterator[None]:
    """Give torch without CUDA a guard for devices of CUDA: that of meta devices, which does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 15).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[1]
    guards[1] = before or guards[14]
    try:
        yield
    finally:
        guards[1] = before


@contextlib.contextmanager
def _lifted_on_host() -> Iterator[None]:
    """Make tensors of numbers on the host first, from where a copy takes them to their device."""
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
