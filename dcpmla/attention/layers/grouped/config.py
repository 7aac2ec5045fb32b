"""The geometry of a layer with keys and values of each head (MHA), or of each group of heads (GQA)."""

from dataclasses import dataclass
from typing import Annotated

from dcpmla.fields import EVEN_SIZE, Size, check_fields, check_tp_size, rules_of


@dataclass(frozen=True, kw_only=True)
class GroupedConfig:
    """Geometry of one layer, before it is sharded.

    Attributes:
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values, each for as many successive heads of queries.
        head_dim: Columns of a query, key or value; RoPE rotates all, in halves (NeoX).
        input_parts: Number of hidden states, side by side, that a token's input consists of: 2 in EAGLE3 heads.
    Raises:
        ValueError: A field has another type or is outside its range, or num_kv_heads does not divide num_heads.
    """

    hidden_size: Size
    num_heads: Size
    num_kv_heads: Size
    head_dim: Annotated[int, EVEN_SIZE]
    input_parts: Size = 1

    def __post_init__(self) -> None:
        check_fields(rules_of(GroupedConfig), vars(self))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_kv_heads}; it must divide num_attention_heads {self.num_heads}"
            )

    @property
    def rope_dim(self) -> int:
        """Return the width of the part that RoPE rotates."""
        return self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Return the factor of the attention scores."""
        return self.head_dim**-0.5

    def heads_per_rank(self, tensor_parallel_size: int) -> int:
        """Return the number of heads of queries of one TP rank.

        Raises:
            ValueError: Heads of queries, or of keys and values, do not divide.
        """
        size, num_kv_heads = tensor_parallel_size, self.num_kv_heads
        check_tp_size(size, self.num_heads, f"the layer's {self.num_heads} attention heads")
        if num_kv_heads % size and size % num_kv_heads:
            raise ValueError(
                f"tensor_parallel_size (-tp) is {size}; it must divide the layer's {num_kv_heads} heads of keys and "
                "values (num_key_value_heads), or be a multiple of them"
            )
        return self.num_heads // size

    def num_shares(self, num_cuts: int) -> int:
        """Return the different sets of heads of keys and values among num_cuts equal cuts of the heads of queries."""
        return min(num_cuts, self.num_kv_heads)

    def kv_width(self, num_cuts: int) -> int:
        """Return the columns of a token's keys and values for one of num_cuts equal cuts of the heads of queries."""
        return 2 * self.head_dim * self.num_kv_heads // self.num_shares(num_cuts)
