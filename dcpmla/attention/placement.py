"""The placement of attention layers: their layout, the ranks that share them, the device of their parameters."""

from dataclasses import dataclass
from typing import Any

import torch

from dcpmla.attention.backends.choice import check_backends
from dcpmla.cache.formats import check_device, storage_dtype
from dcpmla.comm.exchange import Exchange
from dcpmla.config import DCPConfig, MLAConfig
from dcpmla.parallel.mesh import DCPMesh


@dataclass(frozen=True)
class Placement:
    """The placement of attention layers on one rank, the same for all layers of a model.

    Attributes:
        dcp: Layout and format of the cache, bound of the context workspace, contents of the decode exchange.
        mesh: Groups of this rank.
        exchange: Exchange of rows in the DCP group, from `dcpmla.comm.select.select_exchange`.
        dtype, device: Dtype and device of the parameters.
    Raises:
        ValueError: The sizes of dcp and mesh differ, or the device does not support the cache format or a backend.
    """

    dcp: DCPConfig
    mesh: DCPMesh
    exchange: Exchange
    dtype: torch.dtype
    device: torch.device | str

    def __post_init__(self) -> None:
        dcp, mesh = self.dcp, self.mesh
        if (dcp.tensor_parallel_size, dcp.decode_context_parallel_size) != (mesh.tp_size, mesh.dcp_size):
            raise ValueError(
                f"dcp is for tensor_parallel_size {dcp.tensor_parallel_size} and decode_context_parallel_size "
                f"{dcp.decode_context_parallel_size}; the mesh has {mesh.tp_size} and {mesh.dcp_size}"
            )
        check_device(self.cache_dtype, torch.device(self.device))
        check_backends(dcp, torch.device(self.device))

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of cached rows."""
        return storage_dtype(self.dcp.kv_cache_dtype, self.dtype)

    @property
    def factory_kwargs(self) -> dict[str, Any]:
        """The keyword arguments of new parameters."""
        return {"dtype": self.dtype, "device": self.device}


def check_order(config: MLAConfig, dcp: DCPConfig) -> None:
    """Raise ValueError for dcp.deterministic with features of MLA that have no fixed order."""
    features = {
        "an indexer or a window (config.topk)": config.topk is not None,
        "attention sinks (config.has_sinks)": config.has_sinks,
        "gates (config.num_gates, config.query_gates)": config.has_gates,
        "factors of heads' queries (config.has_query_factors)": config.has_query_factors,
    }
    for name, has in features.items():
        if has:
            refuse_order(name, dcp)


def refuse_order(name: str, dcp: DCPConfig) -> None:
    """Raise ValueError for dcp.deterministic with a feature that has no fixed order."""
    if dcp.deterministic:
        raise ValueError(f"deterministic (--deterministic) does not support {name} yet; leave it out")
