"""The choice of experts in a model family."""

import math
from dataclasses import dataclass
from typing import Any

from dcpmla.fields import Rule, one_of, only, optional
from dcpmla.model.router import Router


@dataclass(frozen=True)
class Routing:
    """A family's way of choosing experts, by default DeepSeek-V3's.

    Attributes:
        scoring, group_score, unchosen_score: Fields of `Router`; a scoring of None is the config's scoring_func.
        renormalizes: Whether norm_topk_prob of the config counts.
        reads_topk_method: Whether a topk_method "greedy" in the config means that there are no groups.
        least_chosen: Least number of experts of a token that transformers' module supports.
        weight, bias: Names in the MLP's module of the router's weight and of its correction.
        may_lack_groups: Whether an n_group of None means that there are no groups.
        needs_bias: Whether a checkpoint must have the correction if transformers' module has it.
    """

    scoring: str | None = "sigmoid"
    group_score: str = "top2_sum"
    renormalizes: bool = True
    reads_topk_method: bool = False
    least_chosen: int = 1
    weight: str = "gate.weight"
    bias: str = "gate.e_score_correction_bias"
    needs_bias: bool = True
    may_lack_groups: bool = False
    unchosen_score: float = -math.inf

    def rules(self) -> dict[str, Rule]:
        """Return the rules for the fields of a config.json that would choose experts in another way."""
        scoring = one_of(("sigmoid", "sqrtsoftplus") if self.scoring is None else (self.scoring,))
        rules = dict.fromkeys(("scoring_func", "score_function", "moe_router_activation_func"), scoring)
        methods = ("greedy", "group_limited_greedy") if self.reads_topk_method else ("noaux_tc",)
        rules["topk_method"] = optional(one_of(methods if self.needs_bias else (*methods, "none")))
        return rules if self.renormalizes else rules | {"norm_topk_prob": only(False)}

    def router(self, config: Any, num_shared: int) -> Router:
        """Return the router of a transformers config.

        Args:
            num_shared: Number of further experts, which every token takes.
        """
        in_groups = self.has_groups(config)
        return Router(
            scoring=self.scoring or config.scoring_func,
            group_score=self.group_score,
            num_groups=config.n_group if in_groups else 1,
            topk_groups=config.topk_group if in_groups else 1,
            unchosen_score=self.unchosen_score,
            top_k=config.num_experts_per_tok,
            renormalize=self.renormalizes and getattr(config, "norm_topk_prob", True),
            routed_scaling_factor=config.routed_scaling_factor,
            num_shared=num_shared,
        )

    def has_groups(self, config: Any) -> bool:
        """Return whether experts are chosen group by group."""
        is_greedy = self.reads_topk_method and config.topk_method == "greedy"
        return not is_greedy and hasattr(config, "n_group") and not (self.may_lack_groups and config.n_group is None)

    def check(self, config: Any) -> None:
        """Raise ValueError for experts that the router cannot choose, by the names in the file."""
        is_local = not hasattr(config, "n_routed_experts")
        names = "num_experts_per_tok", "num_local_experts" if is_local else "n_routed_experts", "n_group"
        chosen_name, experts_name, groups_name = (config.attribute_map.get(name, name) for name in names)
        chosen, num_experts = config.num_experts_per_tok, num_routed_experts(config)
        num_choices = num_experts + (getattr(config, "zero_expert_num", None) or 0)
        if self.has_groups(config):
            groups, least = config.n_group, 2 if self.group_score == "top2_sum" else 1
            if groups is None or num_experts % groups or num_experts // groups < least:
                raise ValueError(
                    f"{groups_name} is {groups}; it must divide {experts_name} {num_experts} into groups of at "
                    f"least {least}"
                )
            if config.topk_group is None or config.topk_group > groups:
                raise ValueError(f"topk_group is {config.topk_group}; it must be in [1, {groups_name} {groups}]")
            num_choices = config.topk_group * (num_experts // groups)
        if not self.least_chosen <= chosen <= num_choices:
            raise ValueError(
                f"{chosen_name} is {chosen}; it must be in [{self.least_chosen}, {num_choices}], the experts of "
                f"{experts_name} {num_experts} in the chosen groups"
            )


def num_routed_experts(config: Any) -> int:
    """Return the number of experts that a transformers config's router chooses from; 0 for a model without experts."""
    names = "n_routed_experts", "num_local_experts"  # DeepSeek's, and hybrids'
    return next((number for name in names if (number := getattr(config, name, None))), 0)
