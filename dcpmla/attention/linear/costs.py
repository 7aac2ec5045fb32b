"""The modelled time of pieces of prompts in a model of MLA and of linear attention."""

from dataclasses import dataclass

from dcpmla.attention.costs import LatentCosts
from dcpmla.attention.linear.chunked import BYTES_PER_ELEMENT
from dcpmla.attention.linear.config import DeltaConfig
from dcpmla.attention.routes import Rates
from dcpmla.config import DCPConfig

_CHUNK = 64  # tokens that flash-linear-attention's kernels take at a time


@dataclass(frozen=True, kw_only=True)
class HybridCosts(LatentCosts):
    """The time of layers of MLA and of linear attention, which is constant for each token.

    Args:
        delta_us: Microseconds of a token in all layers of linear attention.
    """

    delta_us: float

    def piece_us(self, new: int, context: int) -> float:
        """Return the microseconds of all layers (`AttentionCosts.piece_us`)."""
        return super().piece_us(new, context) + new * self.delta_us


def delta_token_us(config: DeltaConfig, dcp: DCPConfig, rates: Rates) -> float:
    """Return the microseconds of a token of a long piece in one layer of linear attention, computed in chunks.

    The time is the longer one of the products, and of writing and reading all memory of `attend_in_chunks` once.

    Source: Kimi Linear's report counts 6 D^2 + 3 C D + C^2 operations for a token and a head in chunks of C tokens.
    """
    num_heads, dim = config.heads_per_rank(dcp.tensor_parallel_size), config.head_dim
    flops = num_heads * (6 * dim**2 + 3 * _CHUNK * dim + _CHUNK**2)
    num_bytes = 2 * BYTES_PER_ELEMENT * num_heads * dim
    return max(flops / rates.matmul_tflops / 1e6, num_bytes / rates.gb_per_s / 1e3)
