"""The choice of a group's exchange."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dcpmla.comm.checked import CheckedExchange
from dcpmla.comm.exchange import Exchange, LocalExchange
from dcpmla.comm.nccl import AllGatherReduceScatter, AllToAll
from dcpmla.comm.reach import reach
from dcpmla.config import DCPConfig

Direct = TypeVar("Direct")


@dataclass(frozen=True)
class ChosenExchange:
    """An exchange, and the reason for its choice, for messages."""

    exchange: Exchange
    reason: str


def select_exchange(dcp: DCPConfig, dcp_group: ProcessGroup, device: torch.device | str) -> ChosenExchange:
    """Build the exchange for a DCP group. Collective over the group, and the same on all its ranks.

    Args:
        device: Device of this rank.
    Raises:
        ValueError: The config asks for `direct` or fp8 rows, but the ranks do not reach each other's memory.
    """
    selection = _select(dcp, dcp_group, torch.device(device))
    return (
        replace(selection, exchange=CheckedExchange(selection.exchange, dcp_group)) if dcp.check_exchange else selection
    )


def _select(dcp: DCPConfig, dcp_group: ProcessGroup, device: torch.device) -> ChosenExchange:
    backend = dcp.dcp_comm_backend
    if dist.get_world_size(dcp_group) == 1:
        return ChosenExchange(LocalExchange(), "the cache is not sharded, nothing moves")
    if backend == "ag_rs" and dcp.deterministic:
        return ChosenExchange(AllToAll(dcp_group), "asked for ag_rs, whose reduce-scatter adds in no fixed order")
    if backend == "ag_rs":
        return ChosenExchange(AllGatherReduceScatter(dcp_group), "asked for")
    if backend == "a2a":
        return ChosenExchange(AllToAll(dcp_group), "asked for")
    is_fp8 = dcp.dcp_exchange_dtype == "fp8"

    def new_direct() -> Exchange:
        from dcpmla.comm.direct import DirectExchange  # triton exists on Linux only

        if is_fp8 and torch.cuda.get_device_capability(device) < (8, 9):
            raise ValueError(
                "dcp_exchange_dtype (--dcp-exchange-dtype) is 'fp8', which needs GPUs of compute capability 8.9; "
                "choose auto"
            )
        return DirectExchange(dcp_group, device, timeout=dcp.exchange_timeout, is_fp8=is_fp8)

    direct, obstacle = direct_if_reached(dcp_group, device, new_direct)
    if direct is not None:
        return ChosenExchange(
            direct, "asked for" if backend == "direct" else "auto: all ranks reach each other over NVLink"
        )
    if backend == "direct":
        raise ValueError(
            f"dcp_comm_backend (--dcp-comm-backend) is 'direct', but {obstacle}; choose auto, ag_rs or a2a"
        )
    if is_fp8:
        raise ValueError(
            f"dcp_exchange_dtype (--dcp-exchange-dtype) is 'fp8', which direct alone carries, but {obstacle}; "
            "choose auto"
        )
    return ChosenExchange(AllToAll(dcp_group), f"auto: {obstacle}; one collective a combine where ag_rs needs two")


def direct_if_reached(
    group: ProcessGroup, device: torch.device, new_direct: Callable[[], Direct]
) -> tuple[Direct | None, str]:
    """Call new_direct if all ranks of a group can store into each other's GPU memory. Collective over the group.

    Returns:
        The result of new_direct and ""; or None and a short phrase for messages, the obstacle to `direct`.
    """
    size = dist.get_world_size(group)
    obstacle = reach(group, device) or (f"the group has {size} ranks, more than 8" if size > 8 else "")
    if obstacle:
        return None, obstacle
    try:
        return new_direct(), ""
    except RuntimeError as error:
        # All ranks get this error alike: torch considers GPUs with the same index to be the same GPU.
        if "overlapping devices" not in str(error):
            raise
        return None, "torch has no symmetric memory for ranks that each see one GPU (CUDA_VISIBLE_DEVICES)"
