"""The scales of fp8 caches and of fp8 queries: a float32 number for each layer, the same on every rank, at an address
that stays.

Cached values are multiplied by their scale. It comes from the options, else from the checkpoint, else it is 1; or it is
calculated once.
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dcpmla.config import DCPConfig
from dcpmla.parallel.collectives import named
from dcpmla.parallel.linear import Weight

# Their names in checkpoints, next to the weights of a layer's attention: those that vLLM takes.
KV_SCALE_NAMES = ("k_scale", "attn.k_scale", "mla_attn.k_scale", "k_proj.k_scale", "kv_scale")
Q_SCALE_NAMES = ("q_scale", "attn.q_scale", "mla_attn.q_scale", "q_proj.q_scale")
# Of e4m3's 448: leaves room for larger values later on. vLLM's K_SCALE_CONSTANT and Q_SCALE_CONSTANT, 200, lie midway
# between two codes: the last bit of the largest value, which differs between TP sizes, would decide for one of them.
_CODE_OF_LARGEST = 208.0


def new_scale(value: float | None, device: torch.device | str) -> Tensor:
    """Return a scale, float32 [1]; 1 where no value is given."""
    return torch.full((1,), 1.0 if value is None else value, dtype=torch.float32, device=device)


def read_scale(weights: Mapping[str, Weight], names: tuple[str, ...]) -> float:
    """Return what a checkpoint has under the first of the names that it knows; 1 where it knows none.

    Raises:
        ValueError: a tensor of more than one element, or a number that is not finite and above 0.
    """
    name = next((name for name in names if name in weights), None)
    if name is None:
        return 1.0
    if weights[name].shape.numel() != 1:
        raise ValueError(
            f"checkpoint: tensor {name} has shape {tuple(weights[name].shape)}; the scale of a layer is one number"
        )
    scale = float(weights[name][()])
    if not 0 < scale < math.inf:
        raise ValueError(
            f"checkpoint: tensor {name} is {scale}; it must be a finite number above 0 (--kv-cache-scale gives another "
            f"one)"
        )
    return scale


def missing_scales(weights: Mapping[str, Weight], dcp: DCPConfig) -> set[str]:
    """Return those of "kv_scale" and "q_scale" that are 1 for want of another source."""
    if dcp.kv_cache_dtype != "fp8" or dcp.calculate_kv_scales:
        return set()
    wanted: dict[str, tuple[str, ...]] = {"kv_scale": KV_SCALE_NAMES} if dcp.kv_cache_scale is None else {}
    if dcp.decode_query_dtype == "fp8":
        wanted["q_scale"] = Q_SCALE_NAMES
    return {scale for scale, names in wanted.items() if not any(name in weights for name in names)}


@torch.no_grad()
def calculate_scale_(scale: Tensor, values: Tensor, group: ProcessGroup) -> None:
    """Set a scale, in place, by the largest of all ranks' values; 1 where all are zero. Collective over the group.

    Source: vLLM's --calculate-kv-scales. There the cache's scale is that of kv_c; here k_pe, which shares it, counts as
    well.
    """
    largest = values.abs().amax().float()
    with named("all-reduce of a scale", group):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    scale.copy_((largest / _CODE_OF_LARGEST).where(largest > 0, 1.0))
