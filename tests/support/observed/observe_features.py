"""What engines and layers do in a test, as lines of JSON: the family, the device, the ranks and the features.

Modules of the package are patched as they are imported, before other modules take names from them. Only numbers on the
host are read, so nothing waits for a device. A feature is noted when it happens: a prompt's second piece is computed, a
draft is tried, a block is loaded. Requests that warm an engine up do not count.
"""

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

# Options in messages, by the features that are refused with them.
_OPTIONS = {
    "-tp": "tp",
    "-dcp": "dcp",
    "--speculative-method": "drafts",
    "--kv-cache-dtype": "8-bit caches",
    "--kv-offloading-size": "host",
    "--kv-offloading-path": "disk",
    "--kv-offloading-disk-size": "disk",
    "--deterministic": "deterministic",
}
_NAMES = {"kimi_k3"}  # Families whose text models have another family's model type.
_loading: list[str] = []  # Models that are being loaded, with their warm-up.
_noted: set[str] = set()


def install() -> None:
    """Patch the modules of the package that are imported from now on."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finder that patches modules after their import."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        patch = _PATCHES.get(fullname)
        if patch is None:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def test_id() -> str:
    """Return the running test, "" outside of one."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]


def note(family: str, device: Any, tp: int, dcp: int, **found: list[str]) -> None:
    """Append what is new to this process's file.

    Args:
        device: Device of torch; None for one that is not known, as in a refusal.
        found: Names in `features` or in `refused`.
    """
    import torch

    name = torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else "cpu"
    line = {"test": test_id(), "family": family, "device": name, "tp": tp, "dcp": dcp} | found
    text = json.dumps(line)
    if not line["test"] or not family or text in _noted or not any(found.values()):
        return
    _noted.add(text)
    folder = Path(os.environ["DCPMLA_OBSERVATIONS"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(text + "\n")


def family_name(*model_types: object) -> str:
    """Return the first of a model's types that names a family, "" for none."""
    from dcpmla.integrations.families.table import FAMILIES

    return next((str(name) for name in model_types if name in FAMILIES or name in _NAMES), "")


def family_in(directory: Path, config: Any = None) -> str:
    """Return the family of a checkpoint. Its own file comes first: configs of Sarvam and Kimi-K3 have other types."""
    try:
        raw = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        raw = {}
    text = raw.get("text_config") or {}
    return family_name(raw.get("model_type"), text.get("model_type"), getattr(config, "model_type", None))


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by one that gets it first."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **named: Any) -> Any:
        return wrapper(original, *args, **named)

    setattr(owner, name, wrapped)


def _patch_load_model(module: ModuleType) -> None:
    def load_model(original: Callable[..., Any], directory: Path, config: Any, *args: Any, **named: Any) -> Any:
        model = original(directory, config, *args, **named)
        model.observed_family = family_in(Path(directory), config)
        return model

    _wrap(module, "load_model", load_model)


def _patch_load_engine(module: ModuleType) -> None:
    def load_engine(original: Callable[..., Any], model: Any, dcp: Any, *args: Any, **named: Any) -> Any:
        _loading.append("engine")
        try:
            return original(model, dcp, *args, **named)
        except ValueError as error:
            named_options = (_OPTIONS.get(option) for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", str(error)))
            refused = next(named_options, None)
            if refused:
                files = (Path(model), None) if isinstance(model, str) else (model.directory, model.config)
                sizes = dcp.tensor_parallel_size, dcp.decode_context_parallel_size
                note(family_in(*files), None, *sizes, refused=[refused])
            raise
        finally:
            _loading.pop()

    _wrap(module, "load_engine", load_engine)


def _happened(part: Any) -> set[str]:
    """Return the features that a scheduler or a runner has met since an engine last read them."""
    return part.__dict__.setdefault("observed_features", set())


def _patch_scheduler(module: ModuleType) -> None:
    def take_blocks(original: Callable[..., bool], self: Any, request: Any, batch: Any) -> bool:
        is_taken = original(self, request, batch)
        if is_taken and request.scheduled_time is None:
            keys = getattr(request.loading, "keys", ())
            if request in batch.loads:
                _happened(self).add("host")
            if request.num_computed_tokens > len(keys) * self.allocator.block_tokens:
                _happened(self).add("prefix hits")
        return is_taken

    _wrap(module.Scheduler, "take_blocks", take_blocks)


def _patch_runner(module: ModuleType) -> None:
    def start(
        original: Callable[..., Any], self: Any, batch: Any, previous: Any, drafts: Any, graph: Any, *more: Any
    ) -> Any:
        happened = _happened(self)
        happened.add("steps")
        if graph is not None and graph[0].is_captured:
            happened.add("graphs")
        if "chunks" not in happened and any(_is_later_piece(piece.request) for piece in batch.pieces):
            happened.add("chunks")
        return original(self, batch, previous, drafts, graph, *more)

    _wrap(module.StepRunner, "start", start)


def _is_later_piece(request: Any) -> bool:
    """Return whether a request's next tokens follow a piece of its prompt that it has computed itself."""
    in_prompt = request.num_cached_tokens < request.num_computed_tokens < len(request.prompt_token_ids)
    return in_prompt and not request.num_preemptions


def _patch_engine(module: ModuleType) -> None:
    def step(original: Callable[..., Any], self: Any, *args: Any) -> Any:
        events = original(self, *args)
        _observe(self)
        return events

    _wrap(module.Engine, "step", step)


def _observe(engine: Any) -> None:
    """Note what an engine has shown since the last look, if it is new in this test."""
    before, counts = getattr(engine, "observed_counts", {}), _counts(engine)
    happened = {name for name, count in counts.items() if count > before.get(name, 0)}
    engine.observed_counts = counts
    for part in (engine.scheduler, engine._runner):
        happened |= _happened(part)
        _happened(part).clear()
    test, known = getattr(engine, "observed", ("", set()))
    if test != test_id():
        test, known = test_id(), set()
    if _loading or not happened - known:
        return
    engine.observed = test, known | happened
    if happened == {"prefix hits"}:  # Nothing is computed yet.
        return
    dcp, family = engine.dcp, getattr(engine.model, "observed_family", "")
    tp, size = dcp.tensor_parallel_size, dcp.decode_context_parallel_size
    options = {
        "tp": tp > 1,
        "dcp": size > 1,
        "deterministic": dcp.deterministic,
        "8-bit caches": dcp.kv_cache_dtype not in ("auto", "bf16"),
    }
    features = (known | happened | {name for name, is_set in options.items() if is_set}) - {"steps"}
    note(family, engine.model.device, tp, size, features=sorted(features))


def _counts(engine: Any) -> dict[str, int]:
    """Return an engine's totals of what happens in it."""
    counts = {"drafts": engine.stats.num_draft_tokens}
    if engine.offload is not None and engine.offload.disk is not None:
        counts["disk"] = engine.offload.disk.loaded.bytes
    if engine.handoffs is not None:
        counts["transfers"] = engine.handoffs.sent.num_done + engine.handoffs.received.num_done
    return counts


def _patch_layer(owner: Any, engine: str, attend: str, describe: Callable[..., tuple[str, int, int]]) -> None:
    """Note the layers of another engine as they attend.

    Args:
        attend: Method that attends in a step.
        describe: Function of the arguments of `__init__` that returns the family, tp and dcp.
    """

    def initialize(original: Callable[..., None], self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        self.observed_model, self.observed_test = describe(*args, **named), ""

    def run(original: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
        if self.observed_test != test_id() and hasattr(self, "observed_model"):
            self.observed_test = test_id()
            note(self.observed_model[0], _device_of(args), *self.observed_model[1:], features=[engine])
        return original(self, *args, **named)

    _wrap(owner, "__init__", initialize)
    _wrap(owner, attend, run)


def _device_of(args: Sequence[Any]) -> Any:
    flat = [each for arg in args for each in (arg if isinstance(arg, tuple) else (arg,))]
    return next((each.device for each in flat if hasattr(each, "device")), None)


def _of_vllm(config: Any) -> tuple[str, int, int]:
    model, parallel = config.model_config, config.parallel_config
    names = (getattr(each, "model_type", None) for each in (model.hf_config, model.hf_text_config))
    return family_name(*names), parallel.tensor_parallel_size, parallel.decode_context_parallel_size


def _patch_vllm(module: ModuleType) -> None:
    current: Any = module.get_current_vllm_config  # type: ignore[attr-defined]
    _patch_layer(module.DCPMLAImpl, "vLLM", "attend_in_parts", lambda *_, **__: _of_vllm(current()))


def _patch_compressed(module: ModuleType) -> None:
    _patch_layer(module.DCPMLADeepseekV4Attention, "vLLM", "_attend", lambda config, *_, **__: _of_vllm(config))


def _patch_sglang(module: ModuleType) -> None:
    def describe(runner: Any) -> tuple[str, int, int]:
        parallel, config = module.get_parallel(), runner.model_config.hf_config  # type: ignore[attr-defined]
        return family_name(config.model_type), parallel.attn_tp_size, parallel.attn_dcp_size

    _patch_layer(module.Backend, "SGLang", "forward_decode", describe)


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "dcpmla.integrations.transformers": _patch_load_model,
    "dcpmla.integrations.loading": _patch_load_engine,
    "dcpmla.runtime.scheduler": _patch_scheduler,
    "dcpmla.runtime.runner": _patch_runner,
    "dcpmla.runtime.engine": _patch_engine,
    "dcpmla.integrations.vllm.impl": _patch_vllm,
    "dcpmla.integrations.vllm.compressed.attention": _patch_compressed,
    "dcpmla.integrations.sglang.backend": _patch_sglang,
}
