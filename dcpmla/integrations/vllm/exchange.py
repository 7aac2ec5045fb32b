"""The exchange over vLLM's DCP group: for the plug-in's backend, or alone, under vLLM's own attention kernels."""

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dcpmla.comm.exchange import Exchange
from dcpmla.comm.faults import StepFaults
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.vllm.faults import guard
from dcpmla.integrations.vllm.invariance import is_batch_invariant
from dcpmla.integrations.vllm.names import MLADCPManager, get_pp_group, get_tp_group
from dcpmla.ownership import TILE

logger = logging.getLogger(__name__)


@cache
def exchange_of(group: ProcessGroup, device: torch.device) -> Exchange:
    """Return the exchange of a DCP group, one for all layers and all models of a process; the first call has the worker
    check it after each step, and is collective over the TP group.
    """
    tp, size = get_tp_group(), dist.get_world_size(group)
    # The words of faults do not pass from one stage of a pipeline to the next: collectives need none.
    backend = "auto" if get_pp_group().world_size == 1 else "a2a"
    dcp = DCPConfig(tensor_parallel_size=tp.world_size, decode_context_parallel_size=size, dcp_comm_backend=backend)
    chosen = select_exchange(dcp, group, device)
    if dist.get_rank(group) == 0:
        logger.warning("dcpmla: exchange %s (%s)", chosen.exchange.name, chosen.reason)
    # A second group of the same ranks would allocate its own communicators in the GPU's memory.
    guard(StepFaults(chosen.exchange, dcp, group if size == tp.world_size else tp.device_group, device))
    return chosen.exchange


def install() -> None:
    """Make vLLM gather queries and merge partial outputs by this package's exchange, for any attention kernel."""
    MLADCPManager._init_query_gather = _query_gather
    MLADCPManager._init_combine = _combine


def _query_gather(manager: Any, *_: object, **__: object) -> Callable[[Tensor], Tensor]:
    if manager.padded_num_heads is not None:
        raise ValueError(
            "DCPMLA_VLLM is 'exchange', but the attention backend pads the number of heads; choose another "
            "--attention-backend"
        )
    return exchange_of(manager.group.device_group, manager.device).gather_heads


def _combine(
    manager: Any, num_heads: int, head_dim: int, dtype: torch.dtype, is_lse_base_on_e: bool, use_pcp: bool
) -> Callable[..., Tensor]:
    if use_pcp or manager.num_ubatches > 1:
        raise ValueError(
            "DCPMLA_VLLM is 'exchange', which does neither prefill context parallelism nor micro-batches (--enable-dbo)"
        )
    exchange = exchange_of(manager.group.device_group, manager.device)

    def combine(out: Tensor, lse: Tensor, **_: Tensor) -> Tensor:
        # Kernels mark a query without keys by +inf or NaN, too; some take logarithms to base 2.
        lse = lse.float().where(lse < math.inf, -math.inf)
        return exchange.combine(out, (lse if is_lse_base_on_e else lse * math.log(2)).contiguous())[0]

    return combine


def dcp_config(parallel: Any, block_size: int, kv_cache_dtype: str = "auto") -> DCPConfig:
    """Return the layout of a cache by vLLM's options.

    Raises:
        ValueError: VLLM_BATCH_INVARIANT needs another interleave.
    """
    dcp, interleave = parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size
    if is_batch_invariant() and dcp > 1 and interleave != TILE:
        raise ValueError(
            f"cp_kv_cache_interleave_size (--cp-kv-cache-interleave-size) is {interleave}; with VLLM_BATCH_INVARIANT "
            f"and -dcp {dcp} it must be {TILE}"
        )
    return DCPConfig(
        tensor_parallel_size=parallel.tensor_parallel_size,
        decode_context_parallel_size=dcp,
        cp_kv_cache_interleave_size=interleave,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        deterministic=is_batch_invariant(),
    )
