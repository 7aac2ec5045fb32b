"""Time of steps with pieces of prompts: all tokens' products, attention of the pieces, attention of the decodes."""

from dataclasses import dataclass
from functools import cached_property

from dcpmla.attention.costs import CUT_US
from dcpmla.planning.prefill import PrefillCosts


@dataclass(frozen=True)
class MixedSteps:
    """The predicted time of steps with one piece of a prompt.

    Attributes:
        costs: Time of pieces of prompts.
        num_decodes: Number of requests that decode in the step.
        context: Number of cached tokens of a decode.
    """

    costs: PrefillCosts
    num_decodes: int
    context: int

    def step_us(self, new: int, context: int, num_rows: int, is_one_graph: bool) -> dict[str, float]:
        """Return the microseconds of a step: "total" and its parts.

        Parts are the products, sums and small kernels of all tokens, the attention of the piece and of the decodes,
        with their exchange, and the time that the GPU waits for launches between graphs.

        Args:
            new, context: Number of the piece's tokens, and of tokens before them.
            num_rows: Number of the step's tokens, its padding included.
            is_one_graph: Whether the step is one graph, attention included.
        """
        deployment = self.costs.deployment
        num_decoded = self.num_decodes * deployment.setting.query_len
        # kv_b_proj counts as a piece's attention, and the head sees the last token of a prompt.
        apart = {"kv_b_proj": num_decoded, "lm_head": num_decoded + 1}
        products_us = deployment.products_us(num_rows, apart)
        piece_us = self.costs.attention_us(new, context)
        busy_us = products_us + piece_us + self._decodes_us
        least_us = 0.0 if is_one_graph else deployment.model.attention.num_layers * CUT_US
        return {
            "total": max(busy_us, least_us),
            "products": products_us,
            "piece": piece_us,
            "decodes": self._decodes_us,
            "launches": max(0.0, least_us - busy_us),
        }

    @cached_property
    def _decodes_us(self) -> float:
        if not self.num_decodes:
            return 0.0
        return sum(self.costs.deployment.attention_us(self.num_decodes, self.context).values())
