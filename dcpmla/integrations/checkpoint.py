"""Slices of a safetensors checkpoint, read from disk as they are asked for, block-quantized fp8 undone on the way."""

import json
from collections.abc import Mapping
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
    Raises:
        ValueError: no safetensors checkpoint there, or a file that is not one.
    """

    def __init__(self, directory: Path, fp8_block_size: tuple[int, int] = (128, 128)) -> None:
        self.fp8_block_size = fp8_block_size
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"checkpoint: {index} has no readable weight_map") from error
        elif (directory / "model.safetensors").is_file():
            names = ["model.safetensors"]
        else:
            raise ValueError(f"model: {directory} has neither model.safetensors nor model.safetensors.index.json")
        self._files: dict[str, Any] = {}  # tensor name -> open file; safetensors' handle has no public type
        for name in names:
            try:
                file = safe_open(directory / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"checkpoint: {directory / name} is not a readable safetensors file ({error})"
                ) from error
            self._files.update(dict.fromkeys(file.keys(), file))

    def weights(self, prefix: str) -> Mapping[str, Weight]:
        """The tensors whose names start with a prefix, by the rest of their names."""
        return {
            name.removeprefix(prefix): self._weight(name)
            for name in self._files
            if name.startswith(prefix) and not name.endswith(_SCALE_SUFFIX)
        }

    def _weight(self, name: str) -> Weight:
        file, scale_name = self._files[name], name + _SCALE_SUFFIX
        if scale_name not in self._files:
            return _SafetensorsWeight(file, name)
        return _Fp8BlockWeight(
            _SafetensorsWeight(file, name), self._files[scale_name].get_tensor(scale_name), self.fp8_block_size
        )


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
        blocks = tuple(-(-size // block) for size, block in zip(codes.shape, block_size, strict=True))
        if tuple(scale_inv.shape) != blocks:
            raise ValueError(
                f"checkpoint: an fp8 tensor of shape {tuple(codes.shape)} has scales of shape {tuple(scale_inv.shape)}; "
                f"blocks of {block_size} ask for {blocks}"
            )

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
