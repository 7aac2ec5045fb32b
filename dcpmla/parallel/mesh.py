"""The mesh, which assigns TP ranks to shared latent caches. Callers use the plain process groups of `DCPMesh`."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from dcpmla.config import DCPConfig


@dataclass(frozen=True)
class DCPMesh:
    """A TP group divided into DCP groups of W neighbouring ranks: dcp_rank = tp_rank % W.

    The heads of a DCP group's ranks are neighbours too, so a gather over the group returns heads in TP order.

    Raises:
        ValueError: The DCP group is not the block of W neighbouring TP ranks that contains this rank.
    """

    tp_group: ProcessGroup
    dcp_group: ProcessGroup

    def __post_init__(self) -> None:
        tp_ranks, dcp_ranks = dist.get_process_group_ranks(self.tp_group), dist.get_process_group_ranks(self.dcp_group)
        first = self.tp_rank // len(dcp_ranks) * len(dcp_ranks)
        expected = tp_ranks[first : first + len(dcp_ranks)]
        if dcp_ranks != expected:
            raise ValueError(
                f"dcp_group has ranks {dcp_ranks}; for rank {tp_ranks[self.tp_rank]} of the TP group {tp_ranks} "
                f"a group of {len(dcp_ranks)} neighbours is {expected}"
            )

    @property
    def tp_size(self) -> int:
        """Return the number of ranks of the TP group."""
        return dist.get_world_size(self.tp_group)

    @property
    def tp_rank(self) -> int:
        """Return the number of this rank in its TP group."""
        return dist.get_rank(self.tp_group)

    @property
    def dcp_size(self) -> int:
        """Return the number of ranks that share a cache."""
        return dist.get_world_size(self.dcp_group)

    @property
    def dcp_rank(self) -> int:
        """Return the number of this rank in its DCP group, tp_rank % dcp_size."""
        return dist.get_rank(self.dcp_group)


def init_mesh(tensor_parallel_size: int, decode_context_parallel_size: int) -> DCPMesh:
    """Divide all ranks of the job into TP groups of neighbouring ranks, and TP groups into DCP groups.

    Collective; torch.distributed must be initialized. A serving stack that already has its groups calls
    `DCPMesh(tp_group, dcp_group)` instead.

    Raises:
        ValueError: The sizes do not divide each other or the number of ranks; the message lists sizes that do.
    """
    tp, dcp = tensor_parallel_size, decode_context_parallel_size
    DCPConfig(tensor_parallel_size=tp, decode_context_parallel_size=dcp)
    num_ranks = dist.get_world_size()
    if num_ranks % tp:
        raise ValueError(
            f"tensor_parallel_size (-tp) is {tp}, but the job has {num_ranks} ranks, which it must divide; "
            f"start {tp} ranks (torchrun --nproc-per-node {tp}) or a multiple"
        )
    device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
    tp_mesh = init_device_mesh(device_type, (num_ranks // tp, tp), mesh_dim_names=("dp", "tp"))
    dcp_mesh = init_device_mesh(device_type, (num_ranks // dcp, dcp), mesh_dim_names=("replica", "dcp"))
    return DCPMesh(tp_mesh.get_group("tp"), dcp_mesh.get_group("dcp"))
