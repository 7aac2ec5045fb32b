"""Kimi Linear: three layers of Kimi Delta Attention to one of MLA without positions."""

import re
from dataclasses import dataclass, replace
from typing import Any

from dcpmla.attention.kind import AttentionKind
from dcpmla.attention.linear.config import DeltaConfig
from dcpmla.attention.linear.kind import HybridKind
from dcpmla.config import LARGEST_SIZE
from dcpmla.fields import check_fields, list_of, one_of, whole
from dcpmla.integrations.checkpoint_names import rename
from dcpmla.integrations.families.family import Family

_NAMES = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
        (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
    )
]
_TYPES = ("full_attention", "linear_attention")
_RULES = {
    "layer_types": list_of(one_of(_TYPES)),
    **dict.fromkeys(("linear_num_heads", "linear_head_dim"), whole(1, LARGEST_SIZE)),
    "linear_conv_kernel_dim": whole(2, 64),
}


@dataclass(frozen=True)
class _KimiLinear(Family):
    """Kimi Linear, whose blocks are DeepSeek-V3's but for their attention."""

    def attention(self, config: Any, has_mtp: bool = False) -> AttentionKind:
        """Return layers of MLA and of linear attention."""
        mla = replace(super().attention(config).config, use_rope=False)
        delta = DeltaConfig(
            hidden_size=config.hidden_size,
            num_heads=config.linear_num_heads,
            head_dim=config.linear_head_dim,
            conv_size=config.linear_conv_kernel_dim,
            rms_norm_eps=config.rms_norm_eps,
        )
        is_linear = tuple(kind == "linear_attention" for kind in config.layer_types)
        return HybridKind(mla, config.num_hidden_layers, delta, is_linear)

    def module_name(self, name: str, num_layers: int) -> str:
        """Return the name of transformers' module; Kimi's experts have other names."""
        return rename(super().module_name(name, num_layers), _NAMES)


def _check(config: Any) -> None:
    """Raise ValueError for layers that are not MLA or linear attention, or only one of them."""
    check_fields(_RULES, {name: getattr(config, name) for name in _RULES})
    if len(config.layer_types) != config.num_hidden_layers or {*config.layer_types} != {*_TYPES}:
        raise ValueError(
            f"layer_types has {config.layer_types}; each of {config.num_hidden_layers} layers has one, and both "
            f"{' and '.join(_TYPES)} must be there"
        )


KIMI_LINEAR = _KimiLinear("KimiLinear", check_attention=_check)
