"""The modelled time of pieces of prompts in a layer with keys and values of each head."""

from collections.abc import Sequence
from dataclasses import dataclass

from dcpmla.attention.costs import SEGMENT_ROWS, Rates
from dcpmla.attention.layers.grouped.config import GroupedConfig
from dcpmla.config import DCPConfig

_ELEMENT_BYTES = 2  # width of queries, keys, values and outputs


@dataclass(frozen=True)
class GroupedCosts:
    """The time of one layer, which has one route for all tokens.

    Args:
        config: Geometry of the layer.
        dcp: Sizes of the groups.
        rates: Speeds of the GPU.
    """

    config: GroupedConfig
    dcp: DCPConfig
    rates: Rates

    tokens_per_request = SEGMENT_ROWS  # no bound

    def piece_us(self, new: int, context: int) -> float:
        """Return the microseconds of a piece (`LayerCosts.piece_us`): rows gathered, the group's queries over this
        rank's tokens, results merged.
        """
        dim, size = self.config.head_dim, self.dcp.decode_context_parallel_size
        num_heads = self.config.heads_per_rank(self.dcp.tensor_parallel_size)
        num_pairs = new * context + new * (new + 1) / 2
        attend_us = 4 * num_pairs * num_heads * dim / self.rates.mha_tflops / 1e6
        num_rows = 2 * num_heads + self.config.kv_width(self.dcp.tensor_parallel_size) // dim
        sent_bytes = new * (size - 1) * num_rows * dim * _ELEMENT_BYTES
        return self.rates.call_us + attend_us + sent_bytes / self.rates.link_gb_per_s / 1e3

    def lost_us(self, pieces: Sequence[tuple[int, int]]) -> list[float]:
        """Return zeros, because the layer has one route."""
        return [0.0] * len(pieces)
