"""Slices of a safetensors checkpoint, read from disk when they are asked for."""

import json
from bisect import bisect_left
from collections.abc import Callable, KeysView, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dcpmla.integrations.quantization import FLOATS, StoredTensor, check_has_values, quantized_matrix
from dcpmla.parallel.linear import Weight

_SCALE_SUFFIXES = ("_scale_inv", "_scale")  # after the name of the weight; a value is its code's times the scale
_SHAPE_SUFFIX = ".weight_shape"  # beside compressed-tensors' packed codes, whose own shape says as much


class Checkpoint:
    """The tensors of a directory of safetensors files. Nothing is read before a slice is taken.

    Args:
        directory: holds model.safetensors, or shards with model.safetensors.index.json.
        scale_block: rows and columns that share a scale in quantized weights (`dcpmla.hf_quantization.scale_block`).
        rename: turns a tensor's name in the files into the one that it is known by here.
    Raises:
        ValueError: no safetensors checkpoint there, or a file that is not one.
    """

    def __init__(
        self,
        directory: Path,
        scale_block: tuple[int, int] = (128, 128),
        rename: Callable[[str], str] = lambda name: name,
    ) -> None:
        self._scale_block = scale_block
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            names = _shard_names(index)
        elif (directory / "model.safetensors").is_file():
            names = ["model.safetensors"]
        else:
            raise ValueError(f"model: {directory} has neither model.safetensors nor model.safetensors.index.json")
        # Tensor name -> open file (safetensors' handle has no public type), and the tensor's name there.
        self._files: dict[str, tuple[Any, str]] = {}
        for name in names:
            try:
                file = safe_open(directory / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"checkpoint: {directory / name} is not a readable safetensors file ({error})"
                ) from error
            self._files.update({rename(stored): (file, stored) for stored in file.keys()})  # noqa: SIM118
        self._scales = {
            name: scale for suffix in _SCALE_SUFFIXES for name in self._files if (scale := name + suffix) in self._files
        }
        weights = self._files.keys() - self._scales.values()
        self._weights = sorted(name for name in weights if not name.endswith(_SHAPE_SUFFIX))

    @property
    def names(self) -> KeysView[str]:
        """The names of all tensors."""
        return self._files.keys()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first weight that has floating-point numbers; bfloat16 where none has."""
        stored = (StoredTensor(*self._files[name]).dtype for name in self._weights)
        return next((FLOATS[name] for name in stored if name in FLOATS), torch.bfloat16)

    def check_shapes(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Compare the shapes of tensors, and of their scales, with a model's, by name. No values are read.

        Raises:
            ValueError: a tensor has another shape, or none of its scales; the first one is named.
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
            ValueError: codes without scales, or scales that are none of their tensor's.
        """
        following = self._weights[bisect_left(self._weights, prefix) :]
        names = takewhile(lambda name: name.startswith(prefix), following)
        return {name.removeprefix(prefix): self._weight(name) for name in names}

    def _weight(self, name: str) -> Weight:
        tensor = StoredTensor(*self._files[name])
        if name not in self._scales:
            check_has_values(name, tensor)
            return tensor
        return quantized_matrix(name, tensor, StoredTensor(*self._files[self._scales[name]]), self._scale_block)


def _shard_names(index: Path) -> list[str]:
    """Return the file names in a checkpoint's index, which transformers reads as well.

    Raises:
        ValueError: the index is no JSON object with weight_map and metadata, or a shard is no file of its directory.
    """
    try:
        content = json.loads(index.read_text())
        weight_map, metadata = content["weight_map"], content["metadata"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint: {index} is no JSON object with weight_map and metadata") from error
    if not isinstance(weight_map, dict) or not isinstance(metadata, dict) or not weight_map:
        raise ValueError(f"checkpoint: {index} has a weight_map or metadata that is no object, or empty")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not (index.parent / shard).is_file():
            raise ValueError(
                f"checkpoint: {index} has tensor {name} in {shard!r}; it must be a file of the same directory"
            )
    return sorted(set(weight_map.values()))
