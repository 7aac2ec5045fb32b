"""Slices of a safetensors checkpoint, read from disk when they are asked for, block-quantized fp8 dequantized."""

import json
from collections.abc import Callable, KeysView, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dcpmla.parallel.linear import Weight

_SCALE_SUFFIX = "_scale_inv"


class Checkpoint:
    """The tensors of a directory of safetensors files. Nothing is read before a slice is taken.

    Args:
        directory: holds model.safetensors, or shards with model.safetensors.index.json.
        fp8_block_size: rows and columns that share one scale in block-quantized weights.
        rename: turns a tensor's name in the files into the one that it is known by here.
    Raises:
        ValueError: no safetensors checkpoint there, or a file that is not one.
    """

    def __init__(
        self,
        directory: Path,
        fp8_block_size: tuple[int, int] = (128, 128),
        rename: Callable[[str], str] = lambda name: name,
    ) -> None:
        self.fp8_block_size = fp8_block_size
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

    @property
    def names(self) -> KeysView[str]:
        """The names of all tensors."""
        return self._files.keys()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first weight in floating point that is not quantized."""
        dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
        found = (file.get_slice(stored).get_dtype() for file, stored in self._files.values())
        return next((dtypes[name] for name in found if name in dtypes), torch.bfloat16)

    def check_shapes(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Compare the shapes of tensors, and of their scales, with a model's, by name. No values are read.

        Raises:
            ValueError: a tensor has another shape; the first one is named.
        """
        for name in filter(expected.__contains__, self._files):
            if self._shape(name) != expected[name]:
                raise ValueError(
                    f"checkpoint: tensor {name} has shape {self._shape(name)}; "
                    f"the model's config asks for {expected[name]}"
                )
            self._check_scales(name)

    def weights(self, prefix: str) -> Mapping[str, Weight]:
        """Return the tensors whose names start with a prefix, by the rest of their names.

        Raises:
            ValueError: scales that do not belong to their tensor's blocks.
        """
        return {
            name.removeprefix(prefix): self._weight(name)
            for name in self._files
            if name.startswith(prefix) and not name.endswith(_SCALE_SUFFIX)
        }

    def _weight(self, name: str) -> Weight:
        scale_name, weight = name + _SCALE_SUFFIX, _SafetensorsWeight(*self._files[name])
        if scale_name not in self._files:
            return weight
        self._check_scales(name)
        file, stored = self._files[scale_name]
        return _Fp8BlockWeight(weight, file.get_tensor(stored), self.fp8_block_size)

    def _check_scales(self, name: str) -> None:
        if name + _SCALE_SUFFIX not in self._files:
            return
        shape, found = self._shape(name), self._shape(name + _SCALE_SUFFIX)
        blocks = tuple(-(-size // block) for size, block in zip(shape, self.fp8_block_size, strict=False))
        if len(shape) != 2 or found != blocks:
            raise ValueError(
                f"checkpoint: the fp8 tensor {name} of shape {shape} has scales of shape {found}; "
                f"blocks of {self.fp8_block_size} ask for {blocks}"
            )

    def _shape(self, name: str) -> tuple[int, ...]:
        file, stored = self._files[name]
        return tuple(file.get_slice(stored).get_shape())


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


class _SafetensorsWeight:
    """A tensor on disk; indexing reads the slice alone."""

    def __init__(self, file: Any, name: str) -> None:
        self._slice = file.get_slice(name)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._slice.get_shape())

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        return self._slice[index]


class _Fp8BlockWeight:
    """An e4m3 matrix with a scale per block, as DeepSeek-V3 ships it; indexing gives float32."""

    def __init__(self, codes: Weight, scale_inv: Tensor, block_size: tuple[int, int]) -> None:
        self._codes, self._scale_inv, self._block_size = codes, scale_inv.to(torch.float32), block_size

    @property
    def shape(self) -> torch.Size:
        return self._codes.shape

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        codes = self._codes[index].to(torch.float32)
        index = index if isinstance(index, tuple) else (index, slice(None))
        rows, cols = (
            torch.arange(size)[part] // block
            for size, part, block in zip(self.shape, index, self._block_size, strict=True)
        )
        return codes * self._scale_inv[rows][:, cols]
