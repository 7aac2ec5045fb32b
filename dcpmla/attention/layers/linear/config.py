"""The geometry of a layer of Kimi Delta Attention, linear attention with a decay for each column of its keys."""

from dataclasses import dataclass
from typing import Annotated

from dcpmla.fields import Size, check_fields, check_tp_size, number, one_of, optional, rules_of, whole


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Geometry and constants of one layer of Kimi Delta Attention (KDA), before it is sharded.

    Attributes:
        num_heads, head_dim: Heads, and width of each head's queries, keys and values.
        conv_size: Tokens that the short convolution before attention covers, the token itself included.
        rms_norm_eps: Epsilon of the norm of the output.
        low_ranks: Projections through head_dim columns, by the first letters of their names: of decays and of the
            output's gates (Kimi Linear, GLM-5-Next), of decays alone (Kimi-K3), or of neither (Ling).
        decay_floor: Lower bound of the decay's logarithm (GLM-5-Next, Kimi-K3, Ling); None for no bound (Kimi Linear).
    Raises:
        ValueError: A field has another type or is outside its range.
    Source: Kimi Linear's report, section 3.
    """

    hidden_size: Size
    num_heads: Size
    head_dim: Size
    conv_size: Annotated[int, whole(2, 64)]
    rms_norm_eps: Annotated[float, number(0)]
    low_ranks: Annotated[str, one_of(("fg", "f", ""))] = "fg"
    decay_floor: Annotated[float | None, optional(number(-100))] = None

    def __post_init__(self) -> None:
        check_fields(rules_of(DeltaConfig), vars(self), "delta.{}".format)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a request's memory in a layer, on all TP ranks together."""
        return self.num_heads * self.head_dim**2 * 4

    def heads_per_rank(self, tensor_parallel_size: int) -> int:
        """Return the number of heads of one TP rank.

        Raises:
            ValueError: The heads do not divide; the message lists sizes that do.
        """
        heads = f"the {self.num_heads} heads of the model's linear attention"
        check_tp_size(tensor_parallel_size, self.num_heads, heads)
        return self.num_heads // tensor_parallel_size
