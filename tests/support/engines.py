"""An engine over a model and a cache, by its limits."""

from typing import Any

from dcpmla.cache.blocks import BlockAllocator
from dcpmla.cache.host import HostMemory
from dcpmla.cache.layers import Cache
from dcpmla.cache.tier import HostTier
from dcpmla.config import DCPConfig
from dcpmla.runtime.costs import TOKEN_COSTS, PieceCosts
from dcpmla.runtime.engine import Engine
from dcpmla.runtime.model import Model
from dcpmla.runtime.scheduler import Scheduler


def new_engine(
    model: Model,
    cache: Cache,
    dcp: DCPConfig,
    mesh: Any,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    *,
    enable_prefix_caching: bool = True,
    costs: PieceCosts = TOKEN_COSTS,
    tier: tuple[HostMemory, HostTier] | tuple[None, None] = (None, None),
    **options: Any,
) -> Engine:
    """Return an engine with a scheduler over all blocks of the cache, and of host memory."""
    limits = max_num_batched_tokens, max_num_seqs, enable_prefix_caching
    scheduler = Scheduler(BlockAllocator.of(cache.sizes), *limits, costs, tier[1])
    return Engine(model, cache, dcp, mesh, scheduler, max_model_len, memory=tier[0], **options)
