"""The geometry of an indexer."""

from dataclasses import dataclass
from typing import Annotated

from dcpmla.fields import Flag, Size, check_fields, number, rules_of, whole


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """The geometry of the indexer, which selects the tokens that each token attends to in sparse MLA.

    Attributes:
        num_heads, head_dim: Sizes of the indexer's queries; its keys have one head.
        topk: Maximum number of tokens selected: num_pools x pool_size in pools, and up to pool_size - 1 after the last
            whole pool. So topk is num_pools x pool_size + pool_size - 1.
        rope_interleaved: Whether to rotate pairs (2i, 2i+1) (GLM-5) instead of halves (DeepSeek-V3.2) of the first
            qk_rope_head_dim dims.
        pool_size: Number of consecutive tokens that one key represents, and that are selected together (GLM-5-Next).
            Tokens after the last whole pool are always selected.
        norms_hidden: Whether queries are made from hidden states after a LayerNorm of their own (Mistral Large 4)
            instead of from the query latent.
        rope_last: Whether a checkpoint's rotated dims are the last ones (HY V4); they are put first when they load.
        norm_eps: Epsilon of LayerNorms, of keys and of hidden states.
    """

    num_heads: Size
    head_dim: Size
    topk: Size
    rope_interleaved: Flag
    norms_hidden: Flag = False
    pool_size: Annotated[int, whole(1, 1024)] = 1
    rope_last: Flag = False
    norm_eps: Annotated[float, number(0)] = 1e-6

    def __post_init__(self) -> None:
        check_fields(rules_of(IndexerConfig), vars(self), "indexer.{}".format)

    @property
    def num_pools(self) -> int:
        """Return the number of keys that are selected."""
        return self.topk // self.pool_size
