"""The options of an engine (`EngineOptions`), for `LLM`, the commands and `load_engine`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from dcpmla.config import MODEL_DTYPES
from dcpmla.fields import FLAG, Rule, check_fields, number, one_of, option_label, optional, whole

SPECULATIVE_METHODS = ("none", "ngram", "mtp")
MAX_SPECULATIVE_TOKENS = 15  # a batch of several requests fits into `MAX_DRAFT_ROWS`
_RULES: dict[str, Rule] = {
    "dtype": one_of(MODEL_DTYPES),
    "max_num_batched_tokens": whole(1),
    "max_num_seqs": whole(1),
    "max_prefill_ms": optional(number(0, above=True)),
    "kv_cache_memory_bytes": optional(whole(1)),
    "gpu_memory_utilization": number(0, 1, above=True),
    "enable_prefix_caching": FLAG,
    "enable_expert_parallel": FLAG,
    "enforce_eager": FLAG,
    "load_format": one_of(("auto", "dummy")),
    "expert_dtype": one_of(("auto", "fp8")),
    "speculative_method": one_of(SPECULATIVE_METHODS),
    "num_speculative_tokens": whole(1, MAX_SPECULATIVE_TOKENS),
}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine, under vLLM's names. The layout of the cache is `DCPConfig`.

    Attributes:
        dtype: Dtype of computation, a name or torch's; "auto" takes the checkpoint's, but bfloat16 for float16, whose
            range many models exceed. Also the cache's dtype if dcp.kv_cache_dtype is "auto".
        max_num_batched_tokens: Limit of one step's tokens.
        max_num_seqs: Limit of requests that run at the same time.
        max_prefill_ms: Limit in milliseconds, by the planner's model, for pieces of prompts in a step in which requests
            decode; None for the time of max_num_batched_tokens tokens without a context, and more where reading the
            context again would take over a sixteenth of it.
        kv_cache_memory_bytes: Size of the cache on each rank; by default the free memory after loading, less a step's
            largest activations and decode graphs.
        gpu_memory_utilization: Share of a device's memory to use, in (0, 1]; on CPUs, share of the host's free memory,
            divided among the host's ranks.
        enable_prefix_caching: Whether to reuse cached blocks of earlier requests that begin with the same tokens.
        enable_expert_parallel: Whether to distribute whole experts over the ranks instead of slices.
        enforce_eager: Whether to run without CUDA graphs.
        load_format: Source of weights: "auto" reads the checkpoint, "dummy" needs none and draws random weights, for
            measurements.
        expert_dtype: Format of experts: "auto" leaves them as stored; "fp8" re-encodes 4-bit ones (DeepSeek-V4) without
            rounding: twice the memory, and faster products.
        speculative_method: Source of drafts: "ngram" looks up the last tokens in the request's own, "mtp" runs the
            checkpoint's MTP module.
        num_speculative_tokens: Limit of a request's drafts in a step.
    Raises:
        ValueError: A value is not allowed.
    """

    dtype: torch.dtype | str = "auto"
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_prefill_ms: float | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enable_expert_parallel: bool = False
    enforce_eager: bool = False
    load_format: str = "auto"
    expert_dtype: str = "auto"
    speculative_method: str = "none"
    num_speculative_tokens: int = 3

    def __post_init__(self) -> None:
        check_fields(_RULES, vars(self) | {"dtype": str(self.dtype).removeprefix("torch.")}, option_label)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the options among values of more names."""
        return cls(**{name: values[name] for name in ENGINE_OPTIONS if name in values})

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """Return the dtype of computation; None for the checkpoint's."""
        name = str(self.dtype).removeprefix("torch.")
        return None if name == "auto" else getattr(torch, name)

    @property
    def max_query_len(self) -> int:
        """Return the tokens of a decode with all its drafts."""
        return 1 if self.speculative_method == "none" else 1 + self.num_speculative_tokens


ENGINE_OPTIONS = tuple(field.name for field in fields(EngineOptions))
