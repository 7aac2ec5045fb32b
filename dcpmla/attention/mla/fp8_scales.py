"""The scales of fp8 caches, fp8 queries and fp8 outputs: a float32 number for each layer, the same on every rank, at a
fixed address.

Reading multiplies cached values by their scale. The scale of a cache or of queries comes from the options, else from
the checkpoint, else it is 1; or it is calculated once. Outputs have a scale only if the checkpoint has it.
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

# Names of scales in checkpoints, next to the weights of a layer's attention. vLLM accepts the same names.
KV_SCALE_NAMES = ("k_scale", "attn.k_scale", "mla_attn.k_scale", "k_proj.k_scale", "kv_scale")
Q_SCALE_NAMES = ("q_scale", "attn.q_scale", "mla_attn.q_scale", "q_proj.q_scale")
OUTPUT_SCALE_NAMES = ("o_proj.input_scale",)
# The largest value becomes 208 of e4m3's 448, which leaves room for larger values later. vLLM's K_SCALE_CONSTANT and
# Q_SCALE_CONSTANT, 200, are midway between two codes: the largest value's last bit, which depends on the TP size, would
# decide the code.
_CODE_OF_LARGEST = 208.0


def new_scale(value: float | None, device: torch.device | str) -> Tensor:
    """Return a scale, float32 [1]; 1 where no value is given."""
    return torch.full((1,), 1.0 if value is None else value, dtype=torch.float32, device=device)


def read_scale(weights: Mapping[str, Weight], names: tuple[str, ...]) -> float:
    """Return the checkpoint's scale under the first of the names that it has; 1 if it has none.

    Raises:
        ValueError: The tensor has more than one element, or its number is not finite and above 0.
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
        hint = " (--kv-cache-scale gives another one)" if name in KV_SCALE_NAMES else ""
        raise ValueError(f"checkpoint: tensor {name} is {scale}; it must be a finite number above 0{hint}")
    return scale


def missing_scales(weights: Mapping[str, Weight], dcp: DCPConfig) -> set[str]:
    """Return which scales, "kv_scale" or "q_scale", default to 1 because no source has them."""
    if dcp.kv_cache_dtype != "fp8" or dcp.calculate_kv_scales:
        return set()
    wanted: dict[str, tuple[str, ...]] = {"kv_scale": KV_SCALE_NAMES} if dcp.kv_cache_scale is None else {}
    if dcp.decode_query_dtype == "fp8":
        wanted["q_scale"] = Q_SCALE_NAMES
    return {scale for scale, names in wanted.items() if not any(name in weights for name in names)}


@torch.no_grad()
def calculate_scale_(scale: Tensor, values: Tensor, group: ProcessGroup) -> None:
    """Set a scale, in place, from the largest value on any rank; 1 if all are zero. Collective over the group.

    Source: vLLM's --calculate-kv-scales. There kv_c alone sets the cache's scale; here k_pe, which shares the scale,
    counts as well.
    """
    largest = values.abs().amax().float()
    with named("all-reduce of a scale", group):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    scale.copy_((largest / _CODE_OF_LARGEST).where(largest > 0, 1.0))
