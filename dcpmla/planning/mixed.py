"""Time of steps with pieces of prompts: all tokens' products, attention of the pieces, attention of the decodes."""

from functools import lru_cache

from dcpmla.attention.costs import CUT_US
from dcpmla.planning.machine import Machine
from dcpmla.planning.parameter import Parameter
from dcpmla.planning.predict import decode_attention_us, parameter_us
from dcpmla.planning.prefill import PrefillCosts
from dcpmla.planning.setting import Setting
from dcpmla.planning.weights import ModelSize


class MixedSteps:
    """The predicted time of steps with one piece of a prompt.

    Args:
        machine: Speeds of the GPUs.
        model: Sizes of the model.
        setting: Cut and cache of the model.
        costs: Time of pieces of prompts, by the same machine, model and setting.
        num_decodes: Number of requests that decode in the step.
        context: Number of cached tokens of a decode.
    """

    def __init__(
        self,
        machine: Machine,
        model: ModelSize,
        setting: Setting,
        costs: PrefillCosts,
        num_decodes: int,
        context: int,
    ) -> None:
        self._machine, self._model, self._setting, self._costs = machine, model, setting, costs
        self._num_decoded = num_decodes * setting.query_len
        decodes = decode_attention_us(machine, model.attention, setting, num_decodes, context) if num_decodes else {}
        self._decodes_us = sum(decodes.values())
        self._products_us = lru_cache(maxsize=None)(self._sum_products)

    def step_us(self, new: int, context: int, num_rows: int, is_one_graph: bool) -> dict[str, float]:
        """Return the microseconds of a step: "total" and its parts.

        Parts are the products, sums and small kernels of all tokens, the attention of the piece and of the decodes,
        with their exchange, and the time that the GPU waits for launches between graphs.

        Args:
            new, context: Number of the piece's tokens, and of tokens before them.
            num_rows: Number of the step's tokens, its padding included.
            is_one_graph: Whether the step is one graph, attention included.
        """
        products_us, piece_us = self._products_us(num_rows), self._costs.attention_us(new, context)
        busy_us = products_us + piece_us + self._decodes_us
        least_us = 0.0 if is_one_graph else self._model.attention.num_layers * CUT_US
        return {
            "total": max(busy_us, least_us),
            "products": products_us,
            "piece": piece_us,
            "decodes": self._decodes_us,
            "launches": max(0.0, least_us - busy_us),
        }

    def _sum_products(self, num_rows: int) -> float:
        layers_us = self._model.attention.num_layers * self._machine.layer_us
        return layers_us + sum(
            parameter.count * sum(times.values())
            for parameter in self._model.parameters
            if (num_tokens := self._num_tokens(parameter, num_rows))
            for times in [parameter_us(self._machine, self._model, parameter, self._setting, num_tokens)]
        )

    def _num_tokens(self, parameter: Parameter, num_rows: int) -> int:
        """Return the tokens that are multiplied by a parameter: kv_b_proj counts as a piece's attention, and the head
        sees the last token of a prompt.
        """
        if "kv_b_proj" in parameter.name:
            return self._num_decoded
        return self._num_decoded + 1 if "lm_head" in parameter.name else num_rows
