"""The exchange over SGLang's DCP group, one for the model and the drafts of a process."""

import logging
from functools import cache

import torch
from sglang.srt.runtime_context import get_parallel
from torch.distributed import ProcessGroup

from dcpmla.comm.exchange import Exchange
from dcpmla.comm.faults import StepFaults
from dcpmla.comm.select import select_exchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.sglang.faults import guard

logger = logging.getLogger(__name__)


@cache
def exchange_of(group: ProcessGroup, device: torch.device) -> Exchange:
    """Return the exchange of a DCP group; the first call has the scheduler check it after each step, and is collective
    over the TP group.
    """
    parallel = get_parallel()
    dcp = DCPConfig(
        tensor_parallel_size=parallel.attn_tp_size,
        decode_context_parallel_size=parallel.attn_dcp_size,
        # The words of faults do not pass from one stage of a pipeline to the next: collectives need none.
        dcp_comm_backend="auto" if parallel.pp_size == 1 else "a2a",
    )
    chosen = select_exchange(dcp, group, device)
    logger.info("dcpmla: exchange %s (%s)", chosen.exchange.name, chosen.reason)
    is_whole = dcp.decode_context_parallel_size == dcp.tensor_parallel_size
    tp_group = group if is_whole else parallel.attn_tp_group.device_group
    guard(StepFaults(chosen.exchange, dcp, tp_group, device))
    return chosen.exchange
