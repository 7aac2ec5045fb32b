"""The options of an engine (`EngineOptions`), for `LLM`, the commands and `load_engine`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Self

import torch

from dcpmla.config import MODEL_DTYPES
from dcpmla.fields import FLAG, TEXT, check_fields, number, one_of, option_label, optional, rules_of, tuple_of, whole

OWN_MODULES = ("mtp", "dspark")  # methods whose module is in the model's checkpoint
SPECULATIVE_METHODS = ("none", "ngram", *OWN_MODULES, "eagle3")
MAX_SPECULATIVE_TOKENS = 15  # a batch of several requests fits into `MAX_DRAFT_ROWS`
_Count = Annotated[int, whole(1)]
_Flag = Annotated[bool, FLAG]


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
            context and the piece again would take over a twelfth of it.
        kv_cache_memory_bytes: Size of the cache on each rank; by default the free memory after loading, less a step's
            largest activations and decode graphs, and on CPUs no more than max_num_seqs sequences of max_model_len
            tokens need.
        gpu_memory_utilization: Share of a device's memory to use, in (0, 1]; on CPUs, share of the host's free memory,
            divided among the host's ranks.
        enable_prefix_caching: Whether to reuse cached blocks of earlier requests that begin with the same tokens.
        kv_offloading_size: GiB of host memory, of all ranks together, for blocks that leave the cache, or with
            kv_hot_tokens for all latents, pinned at the start; None without. It needs enable_prefix_caching.
        kv_offloading_path: Directory on local disks, where later jobs find copies of these blocks; None without.
            It needs kv_offloading_size and kv_offloading_disk_size.
        kv_offloading_disk_size: GiB of all ranks' files in kv_offloading_path together, allocated at the start.
        enable_expert_parallel: Whether to distribute whole experts over the ranks instead of slices.
        enforce_eager: Whether to run without CUDA graphs.
        load_format: Source of weights: "auto" reads the checkpoint, "dummy" needs none and draws random weights, for
            measurements.
        expert_dtype: Format of experts: "auto" leaves them as stored; "fp8" re-encodes 4-bit ones (DeepSeek-V4) without
            rounding: twice the memory, and faster products.
        speculative_method: Source of drafts: "ngram" looks up the last tokens in the request's own, "mtp" runs the
            checkpoint's MTP module, "dspark" its DSpark module (DeepSeek-V4 and V4.1), "eagle3" a head that was trained
            for the model (speculative_model).
        speculative_model: Directory or hub id of the EAGLE3 head; None with other methods.
        num_speculative_tokens: Limit of a request's drafts in a step.
        synthetic_acceptance_length: Average number of tokens of a step with drafts, in [1, 1 + num_speculative_tokens],
            for measurements: random numbers accept drafts. None verifies them.
        synthetic_acceptance_rates: Probability of each draft to be accepted with all drafts before it, in place of
            synthetic_acceptance_length. The numbers do not increase.
    Raises:
        ValueError: A value is not allowed.
    """

    dtype: Annotated[torch.dtype | str, one_of(MODEL_DTYPES)] = "auto"
    max_num_batched_tokens: _Count = 8192
    max_num_seqs: _Count = 256
    max_prefill_ms: Annotated[float | None, optional(number(0, above=True))] = None
    kv_cache_memory_bytes: Annotated[int | None, optional(whole(1))] = None
    gpu_memory_utilization: Annotated[float, number(0, 1, above=True)] = 0.9
    enable_prefix_caching: _Flag = True
    kv_offloading_size: Annotated[float | None, optional(number(0, above=True))] = None
    kv_offloading_path: Annotated[str | None, optional(TEXT)] = None
    kv_offloading_disk_size: Annotated[float | None, optional(number(0, above=True))] = None
    enable_expert_parallel: _Flag = False
    enforce_eager: _Flag = False
    load_format: Annotated[str, one_of(("auto", "dummy"))] = "auto"
    expert_dtype: Annotated[str, one_of(("auto", "fp8"))] = "auto"
    speculative_method: Annotated[str, one_of(SPECULATIVE_METHODS)] = "none"
    speculative_model: Annotated[str | None, optional(TEXT)] = None
    num_speculative_tokens: Annotated[int, whole(1, MAX_SPECULATIVE_TOKENS)] = 3
    synthetic_acceptance_length: Annotated[float | None, optional(number(1, 1 + MAX_SPECULATIVE_TOKENS))] = None
    synthetic_acceptance_rates: Annotated[Sequence[float], tuple_of(number(0, 1))] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "synthetic_acceptance_rates", tuple(self.synthetic_acceptance_rates))
        values = vars(self) | {"dtype": str(self.dtype).removeprefix("torch.")}
        check_fields(rules_of(EngineOptions), values, option_label)
        if self.kv_offloading_size is not None and not self.enable_prefix_caching:
            raise ValueError(
                "kv_offloading_size (--kv-offloading-size) keeps blocks for later requests, which "
                "enable_prefix_caching (--enable-prefix-caching) False rules out; give one of the two"
            )
        if (self.speculative_model is not None) != (self.speculative_method == "eagle3"):
            raise ValueError(
                f"speculative_model (--speculative-model) is {self.speculative_model!r} with speculative_method "
                f"(--speculative-method) {self.speculative_method!r}; give a head with eagle3, and with it alone"
            )
        self._check_rates()
        self._check_disk()

    def _check_rates(self) -> None:
        """Raise ValueError for a simulated acceptance that these drafts cannot have."""
        length, rates, most = self.synthetic_acceptance_length, self.synthetic_acceptance_rates, self.max_query_len
        if length is not None and (rates or not 1 < most >= length):
            raise ValueError(
                f"synthetic_acceptance_length (--synthetic-acceptance-length) is {length}, with "
                f"synthetic_acceptance_rates {rates}; it must be in [1, {most}], with drafts and without rates"
            )
        if rates and (len(rates) != most - 1 or list(rates) != sorted(rates, reverse=True)):
            raise ValueError(
                f"synthetic_acceptance_rates (--synthetic-acceptance-rates) is {rates}; it must have a rate for each "
                f"of {most - 1} drafts, none above the one before"
            )

    def _check_disk(self) -> None:
        """Raise ValueError unless all options of the disk are given, or none."""
        path, size = self.kv_offloading_path, self.kv_offloading_disk_size
        if path is not None and self.kv_offloading_size is None:
            raise ValueError(
                f"kv_offloading_path (--kv-offloading-path) is {path!r}; blocks reach disks through host memory, so "
                "kv_offloading_size (--kv-offloading-size) must be given, too"
            )
        if (path is None) != (size is None):
            raise ValueError(
                f"kv_offloading_path (--kv-offloading-path) is {path!r} and kv_offloading_disk_size "
                f"(--kv-offloading-disk-size) is {size!r}; give both or neither"
            )

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
