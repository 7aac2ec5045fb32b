"""The layout and the caches of a model that a plan is for, and the GPUs of its job."""

from dataclasses import dataclass
from typing import Annotated

from dcpmla.config import INDEX_CACHE_DTYPES, DCPConfig
from dcpmla.fields import check_fields, number, one_of, option_label, optional, rules_of, whole
from dcpmla.planning.capacity import FORMATS


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Layout and cache of a model, and the GPUs of the job.

    Attributes:
        tp: Ranks that cut the heads.
        dcp: Ranks that share one cache.
        kv_cache_dtype: Format of the cache.
        num_gpus: GPUs of the whole job: replicas of the TP group share its batch. By default one TP group.
        index_cache_dtype: Format of the index cache of sparse MLA and DeepSeek-V4; "auto" is bf16.
        enable_expert_parallel: Whether a rank has its share of the experts whole, instead of a slice of every one.
        num_speculative_tokens: Drafts of each request that a step verifies. The time of drafting is not counted.
        acceptance_rate: Probability that a draft is accepted if all drafts before it are.
        kv_hot_tokens: Tokens whose latents are on the GPUs of a DCP group, in each layer, while all latents are in host
            memory (docs/hot_tokens.md); None for all.
    """

    tp: int
    dcp: int
    kv_cache_dtype: Annotated[str, one_of(FORMATS)]
    num_gpus: Annotated[int | None, optional(whole(1))] = None
    index_cache_dtype: Annotated[str, one_of(INDEX_CACHE_DTYPES)] = "auto"
    enable_expert_parallel: bool = False
    num_speculative_tokens: Annotated[int, whole(0, 15)] = 0
    acceptance_rate: Annotated[float, number(0, 1)] = 0.8
    kv_hot_tokens: Annotated[int | None, optional(whole(1))] = None

    def __post_init__(self) -> None:
        check_fields(rules_of(Setting), vars(self), option_label)
        self.dcp_config  # noqa: B018 (raises for sizes that do not divide)
        if self.num_ranks % self.tp:
            multiple = f"a multiple of tensor_parallel_size (-tp) {self.tp}"
            raise ValueError(f"num_gpus (--num-gpus) is {self.num_gpus}; it must be {multiple}")

    @property
    def dcp_config(self) -> DCPConfig:
        """Return the layout and the formats of its caches."""
        return DCPConfig(
            tensor_parallel_size=self.tp,
            decode_context_parallel_size=self.dcp,
            kv_cache_dtype=self.kv_cache_dtype,
            index_cache_dtype=self.index_cache_dtype,
            kv_hot_tokens=self.kv_hot_tokens,
        )

    @property
    def query_len(self) -> int:
        """Return the tokens that a step computes for each request."""
        return 1 + self.num_speculative_tokens

    @property
    def tokens_a_step(self) -> float:
        """Return a request's new tokens in a step on average: the accepted drafts, and one past them."""
        return sum(self.acceptance_rate**num for num in range(self.query_len))

    @property
    def num_ranks(self) -> int:
        return self.num_gpus or self.tp

    @property
    def num_replicas(self) -> int:
        return self.num_ranks // self.tp

    def share(self, batch: int) -> int:
        """Return the requests of the fullest replica, of a batch of the whole job."""
        return -(-batch // self.num_replicas)

    def __str__(self) -> str:
        return f"tp {self.tp}, dcp {self.dcp}, {self.kv_cache_dtype}"
