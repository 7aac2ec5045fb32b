"""A.X-K2: sparse MLA with gates of its heads' outputs, and gates of norms."""

from dataclasses import dataclass, replace
from typing import Any

from dcpmla.config import MLAConfig
from dcpmla.fields import SIZE, whole
from dcpmla.integrations.families.routing import Routing
from dcpmla.integrations.families.sparse import LAYER_RULES, SparseFamily

_RULES = {
    "gated_norm_rank": SIZE,
    "moe_layer_freq": whole(1),
    **LAYER_RULES,
}


# Names in checkpoints, and in files with transformers' names -> names of modules.
_NAMES = (
    (r"layernorm\.W_down\.", "layernorm.mlp.fc1."),
    (r"layernorm\.W_up\.", "layernorm.mlp.fc2."),
    (r"\.q_gate_proj\.", ".q_b_proj."),
)


@dataclass(frozen=True)
class _AXK2(SparseFamily):
    """A.X-K2, whose query projection makes the gates of attention's output, too."""

    def mla(self, config: Any) -> MLAConfig:
        """Return the geometry of layers with gates."""
        return replace(super().mla(config), query_gates=True)

    def extend(self, model: Any) -> None:
        """Give the query projections the name that checkpoints have."""
        for layer in model.model.layers:
            layer.self_attn.q_b_proj = layer.self_attn.q_gate_proj
            del layer.self_attn.q_gate_proj


AXK2 = _AXK2(
    "AXK2",
    Routing(may_lack_groups=True, unchosen_score=0.0),
    rules=_RULES,
    names=_NAMES,
    no_mtp=", which A.X-K2 does not have",
)
