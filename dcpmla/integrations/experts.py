"""Experts over the TP group: a slice of each on every rank, or (expert parallelism) num_experts / tp_size whole ones.

Under expert parallelism all ranks see all tokens and route them alike. A rank computes the routes to its own
experts, and the sum over the ranks that follows experts anyway (transformers' style `moe_tp_experts`) adds the others'.
The plan is written with styles that transformers 5.17 to 5.23 share: their own expert-parallel plans changed in
between, and LongCat has no such plan.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from dcpmla.config import divisors


def check_experts(model: Any, tp_size: int, enable_expert_parallel: bool) -> None:
    """Raise ValueError where experts cannot be cut or spread evenly; other layers may be cut unevenly."""
    all_experts = list(experts_of(model))
    if enable_expert_parallel and not all_experts:
        raise ValueError(
            "enable_expert_parallel (--enable-expert-parallel): the model has no experts; leave the option out"
        )
    for experts in all_experts:
        num_experts, _, intermediate_size = experts.down_proj.shape
        if enable_expert_parallel and num_experts % tp_size:
            raise ValueError(
                f"enable_expert_parallel (--enable-expert-parallel): {num_experts} experts cannot be spread over "
                f"{tp_size} ranks; "
                f"tensor_parallel_size (-tp) must be one of {', '.join(map(str, divisors(num_experts)))}"
            )
        if not enable_expert_parallel and intermediate_size % tp_size:
            raise ValueError(
                f"tensor_parallel_size (-tp) is {tp_size}; it must divide the experts' intermediate size "
                f"{intermediate_size}"
            )


def choose_implementation(model: Any, tp_size: int) -> None:
    """Compute one expert after the other where slices are too narrow for grouped matrix products, which take rows of
    whole 16 bytes. To be called after loading.
    """
    widths = {experts.down_proj.shape[-1] // tp_size * experts.down_proj.itemsize for experts in experts_of(model)}
    if any(width % 16 for width in widths):
        model.set_experts_implementation("eager")


def spread_experts(model: Any) -> None:
    """Change the rules of experts' weights from slices of every expert to whole ones. To be called before loading."""
    weights = (".experts.gate_up_proj", ".experts.down_proj")
    model._tp_plan |= {rule: "grouped_gemm" for rule in model._tp_plan if any(weight in rule for weight in weights)}


def keep_own_routes(model: Any, tp_rank: int, tp_size: int) -> None:
    """Let experts see the routes to their rank's part alone. To be called after loading."""
    for experts in experts_of(model):
        num_experts = experts.down_proj.shape[0]
        num_own = num_experts // tp_size
        if hasattr(experts, "zero_expert_num"):
            experts.num_routed_experts, experts.total_experts = num_own, num_own + 1
        experts.register_forward_pre_hook(
            partial(_own_routes, num_experts=num_experts, first=tp_rank * num_own, num_own=num_own)
        )


def _own_routes(
    _experts: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], *, num_experts: int, first: int, num_own: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn ids of all experts into ids among a rank's own; num_own, with weight 0, is no expert of this rank.

    Ids from num_experts on are LongCat's zero experts, the identity. They too become num_own, which LongCat's module
    takes for the identity, but keep their weight: every rank adds its share (transformers' style
    `moe_identity_expert` divides by the number of ranks).
    """
    hidden_states, expert_ids, expert_weights = inputs
    own = (expert_ids >= first) & (expert_ids < first + num_own)
    elsewhere = ~own & (expert_ids < num_experts)
    return hidden_states, (expert_ids - first).where(own, num_own), expert_weights.masked_fill(elsewhere, 0)


def experts_of(model: Any) -> Iterator[Any]:
    """Return the modules that hold all experts of a layer."""
    return (experts for _, experts in named_experts(model))


def named_experts(model: Any) -> Iterator[tuple[str, Any]]:
    """Return the modules that hold all experts of a layer, each with its name."""
    return ((name, module) for name, module in model.named_modules() if name.endswith(".experts"))
