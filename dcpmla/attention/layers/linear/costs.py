"""The modelled time of pieces of prompts in a layer of linear attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dcpmla.attention.costs import SEGMENT_ROWS, Rates
from dcpmla.attention.layers.linear.config import DeltaConfig
from dcpmla.attention.layers.linear.delta import BYTES_PER_ELEMENT
from dcpmla.config import DCPConfig

_CHUNK = 64  # tokens that flash-linear-attention's kernels take at a time


@dataclass(frozen=True)
class DeltaCosts:
    """The time of one layer, which is constant for each token of a long piece.

    Args:
        config: Geometry of the layer.
        dcp: Sizes of the groups.
        rates: Speeds of the GPU.
    """

    config: DeltaConfig
    dcp: DCPConfig
    rates: Rates

    tokens_per_request = SEGMENT_ROWS  # no bound

    def piece_us(self, new: int, context: int) -> float:
        """Return the microseconds of a piece (`LayerCosts.piece_us`)."""
        return new * self._token_us

    def lost_us(self, pieces: Sequence[tuple[int, int]]) -> list[float]:
        """Return zeros, because the layer has one route."""
        return [0.0] * len(pieces)

    @cached_property
    def _token_us(self) -> float:
        """Return the microseconds of a token: the longer one of the products, and of writing and reading all memory of
        `attend_in_chunks` once.

        Source: Kimi Linear's report counts 6 D^2 + 3 C D + C^2 operations for a token and a head in chunks of C tokens.
        """
        num_heads, dim = self.config.heads_per_rank(self.dcp.tensor_parallel_size), self.config.head_dim
        flops = num_heads * (6 * dim**2 + 3 * _CHUNK * dim + _CHUNK**2)
        num_bytes = 2 * BYTES_PER_ELEMENT * num_heads * dim
        return max(flops / self.rates.matmul_tflops / 1e6, num_bytes / self.rates.gb_per_s / 1e3)
