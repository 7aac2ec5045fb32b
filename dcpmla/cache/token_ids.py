"""The ids of all cached tokens, which memories of n-grams read (`CachePlan.keeps_token_ids`)."""

import torch
from torch import Tensor

from dcpmla.cache.memory import zeros
from dcpmla.cache.plan import CachePlan


def token_id_bytes(plan: CachePlan) -> int:
    """Return the bytes of the ids on each rank."""
    return 4 * plan.tokens_total if plan.keeps_token_ids else 0


def allocate_token_ids(plan: CachePlan, device: torch.device) -> Tensor | None:
    """Allocate `Cache.token_ids`."""
    if not plan.keeps_token_ids:
        return None
    return zeros((plan.num_blocks, plan.block_tokens), torch.int32, device)
