"""Slices of a safetensors checkpoint, read from disk on demand."""

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Set
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dcpmla.hf_quantization import scale_blocks
from dcpmla.integrations.quantization import FLOATS, StoredTensor, check_has_values, quantized_matrix
from dcpmla.parallel.linear import Weight

# Tensors beside a weight, by what follows its name: a value is its code's, less a zero point, times the scales.
_BESIDE = {
    **{"_scale_inv": "scales", "_scale": "scales", "_zero_point": "zeros"},
    **{"_scale_2": "factor", "_global_scale": "divisor"},  # modelopt's and compressed-tensors' of NVFP4
}
# Tensors that the codes make redundant: their shape (compressed-tensors), and the groups of columns in order (GPTQ).
_UNUSED = (".weight_shape", ".g_idx")


class Checkpoint:
    """The tensors of a directory of safetensors files. Nothing is read before a slice is taken.

    Args:
        directory: Directory of shards with model.safetensors.index.json, of model.safetensors, or else of any
            *.safetensors. Shards of the index may be absent if none of their tensors is used.
        quantization: A quantization_config that `check_quantization` accepts; None means DeepSeek's blocks in fp8.
        rename: Function from a tensor's name in the files to its name here.
        is_used: Function from a tensor's name here to whether the model uses it. Shards that hold no such tensor,
            by the index, are not opened.
    Attributes:
        names: Names of all tensors, also in absent shards, without shards that are not opened.
    Raises:
        ValueError: The directory has no such file, or one is broken.
    """

    def __init__(
        self,
        directory: Path,
        quantization: Mapping[str, Any] | None = None,
        rename: Callable[[str], str] = lambda name: name,
        is_used: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._scale_blocks = scale_blocks(quantization)
        index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
        has_index = index.is_file()
        shards = _read_index(index) if has_index else {}
        opened = {shard for name, shard in shards.items() if is_used(rename(name))}
        files = {directory / shard for shard in opened}
        if not has_index:
            files = {single} if single.is_file() else set(directory.glob("[!.]*.safetensors"))
        if not files:
            raise ValueError(
                f"model: {directory} has neither model.safetensors nor model.safetensors.index.json, and no other "
                "*.safetensors"
            )
        # Tensor name -> open file (safetensors' handle has no public type), and the tensor's name there.
        self._files: dict[str, tuple[Any, str]] = {}
        for path in sorted(filter(Path.exists, files)):
            file = _open(path)
            tensors = {rename(stored): (file, stored) for stored in file.keys()}  # noqa: SIM118
            if not has_index and (twice := tensors.keys() & self._files.keys()):
                raise ValueError(f"checkpoint: tensor {min(twice)} is in {path} and in another file of its directory")
            self._files |= tensors
        missing = {shard for shard in opened if not (directory / shard).exists()}
        absent = {rename(name): shard for name, shard in shards.items() if shard in missing}
        self._absent = {name: shard for name, shard in absent.items() if name not in self._files}
        self.names: Set[str] = self._files.keys() | self._absent.keys()
        self._beside: dict[str, dict[str, str]] = {}  # weight -> role of a tensor beside it -> that tensor's name
        for suffix, what in _BESIDE.items():
            for name in self.names:
                if (other := name + suffix) in self.names:
                    self._beside.setdefault(name, {})[what] = other
        weights = self.names - {other for parts in self._beside.values() for other in parts.values()}
        self._weights = sorted(name for name in weights if not name.endswith(_UNUSED))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first weight that has floating-point numbers; bfloat16 without one."""
        stored = (StoredTensor(*self._files[name]).dtype for name in self._weights if name in self._files)
        return next((FLOATS[name] for name in stored if name in FLOATS), torch.bfloat16)

    def check_shapes(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Compare the shapes of tensors, and of their scales, with a model's, by name. No values are read.

        Raises:
            ValueError: A tensor has another shape, lacks its scales or is in an absent shard; the first one is named.
        """
        for name in filter(expected.__contains__, self._weights):
            shape = tuple(self._weight(name).shape)
            if shape != expected[name]:
                raise ValueError(
                    f"checkpoint: tensor {name} has shape {shape}; the model's config asks for {expected[name]}"
                )

    def weights(self, prefix: str) -> Mapping[str, Weight]:
        """Return the tensors whose names start with a prefix, by the rest of their names; scales belong to theirs.

        Raises:
            ValueError: Codes have no scales, or scales do not match their tensor.
        """
        following = self._weights[bisect_left(self._weights, prefix) :]
        names = takewhile(lambda name: name.startswith(prefix), following)
        return {name.removeprefix(prefix): self._weight(name) for name in names}

    def _weight(self, name: str) -> Weight:
        names = {"codes": name, **self._beside.get(name, {})}
        if shards := [self._absent[part] for part in names.values() if part in self._absent]:
            return _AbsentTensor(name, shards[0])
        parts = {what: StoredTensor(*self._files[part]) for what, part in names.items()}
        if "scales" not in parts:
            check_has_values(name, parts["codes"])
            return parts["codes"]
        return quantized_matrix(name, parts, self._scale_blocks)


class _AbsentTensor:
    """A tensor whose shard is not in the directory: a part of the checkpoint that may not be needed."""

    def __init__(self, name: str, shard: str) -> None:
        self._message = f"checkpoint: tensor {name} is in {shard}, which is not in the model's directory"

    @property
    def shape(self) -> torch.Size:
        raise ValueError(self._message)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        raise ValueError(self._message)


def _open(path: Path) -> Any:
    """Return safetensors' handle of a file."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"checkpoint: {path} is not a readable safetensors file ({error})") from error


def _read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor in a checkpoint's index.

    Raises:
        ValueError: The index is no JSON object with a weight_map of file names.
    """
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"checkpoint: {index} is no JSON object with weight_map") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"checkpoint: {index} has a weight_map that is no object, or empty")
    for name, shard in weight_map.items():
        is_name = isinstance(shard, str) and Path(shard).name == shard
        if not is_name or (index.parent / shard).is_dir():
            raise ValueError(
                f"checkpoint: {index} has tensor {name} in {shard!r}; it must be a file of the same directory"
            )
    return weight_map
