"""vLLM's attention backend for DeepSeek-V4: the metadata of a step, from numbers of vLLM."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dcpmla.attention.backends.calls import decode_workspace
from dcpmla.attention.layers.compressed.step import compressed_traits, with_angles
from dcpmla.attention.step.metadata import DecodeMetadata, StepBuilder, StepMetadata, lay_out
from dcpmla.attention.step.table import StepRequests, StepTokens
from dcpmla.integrations.absorbed import table_of_lengths
from dcpmla.integrations.vllm.compressed.names import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    MultipleOf,
)
from dcpmla.upload import upload


class DCPMLACompressedBackend(AttentionBackend):
    """Properties that vLLM asks of the layer that declares the pages."""

    @staticmethod
    def get_name() -> str:
        return "DCPMLA_COMPRESSED"

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError  # vLLM's DeepSeek-V4 has no such class: its layer attends

    @staticmethod
    def get_builder_cls() -> type:
        return CompressedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]  # `options.layout_of` checks it

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return -(-default_block_size // 256) * 256  # vLLM's own layers have the same

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any


class LazyStep:
    """A step, which the first layer that runs lays out. A replay of a CUDA graph of a whole step needs none."""

    def __init__(self, build: Callable[[], StepMetadata]) -> None:
        self._build = build
        self._step: StepMetadata | None = None

    @property
    def step(self) -> StepMetadata:
        """The step as all layers see it."""
        if self._step is None:
            self._step = self._build()
        return self._step

    def renew(self) -> None:
        """Lay the step out again when a layer runs next, after its lengths have changed on the device."""
        self._step = None


class CompressedMetadataBuilder(AttentionMetadataBuilder):
    """The metadata of each step.

    A request's state in the cache has the number of the request in the worker's table. It keeps this number from the
    step that admits it, or that resumes it after a preemption, to its end. A dummy request, in warm-ups and idle ranks,
    has no blocks but vLLM's null block, and gets no state.

    Full graphs of decode read block tables and lengths where vLLM keeps them, and states where the layers do.

    Attributes:
        layers: Numbers of a draft module's layers, if the steps are its drafts after the first one, of one token a
            request; None for steps of all layers, the module's included.
    """

    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH
    supports_draft_decode_metadata_update = True
    layers: list[int] | None = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        (leader,) = layer_names
        self.stack = vllm_config.compilation_config.static_forward_context[leader].stack
        self.workspace = decode_workspace(device)
        self.reorder_batch_threshold = 1 + self.stack.num_drafts

    @cached_property
    def steps(self) -> StepBuilder:
        """The builder of steps over the cache, which vLLM allocates after this object."""
        plan, rank = self.stack.cache.sizes, self.stack.placement.mesh.dcp_rank
        return StepBuilder(plan.dcp, rank, self.device, compressed_traits(plan))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> LazyStep:
        """Return a step of decodes, then prefills, then padding."""
        if self.layers is not None:  # drafts of the requests that the latest step had
            return LazyStep(lambda: self._with_angles(self._static_step(common_attn_metadata)))
        self._write_states(common_attn_metadata)
        return LazyStep(lambda: self._with_angles(self._step(common_attn_metadata)))

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> LazyStep:
        """Return a step of decodes alone over memory that stays in place."""
        self._write_states(common_attn_metadata)
        return LazyStep(lambda: self._with_angles(self._static_step(common_attn_metadata)))

    def update_draft_decode_metadata(self, metadata: LazyStep) -> None:
        """Lay out the next draft's step from what vLLM has updated on the device."""
        metadata.renew()

    def _with_angles(self, step: StepMetadata) -> StepMetadata:
        kinds = self.stack.config.layer_kinds
        return with_angles(step, self.stack.rotary, None if self.layers is None else [kinds[n] for n in self.layers])

    def _write_states(self, common: Any) -> None:
        """Write the state of each request into memory that graphs read; -1 for padding."""
        numbers = np.full(len(self.stack.states), -1, dtype=np.int32)
        numbers[: len(common.req_idx)] = common.req_idx
        self.stack.states.copy_(upload([numbers], self.device)[0], non_blocking=True)

    def _states_of(self, table: Tensor) -> Tensor:
        """Return the states of the requests with this block table [n, max_blocks]: -1 for dummies, whose blocks are
        vLLM's null block.
        """
        return self.stack.states[: len(table)].where(table[:, 0] > 0, -1)

    def _step(self, common: Any) -> StepMetadata:
        """Return a step of any requests. vLLM's lengths on the host are exact of prefills; of decodes they are upper
        bounds if the device has not yet rejected drafts.
        """
        query_lens = common.query_start_loc_cpu.diff().numpy()
        num_reqs = int((query_lens > 0).sum())  # padding comes last
        query_lens = query_lens[:num_reqs]
        seq_lens = common.seq_lens_cpu_upper_bound[:num_reqs].numpy()
        segment_len = self.steps.segment_len(1 + self.stack.num_drafts)
        is_long = query_lens > segment_len
        num_decodes = int(is_long.argmax()) if is_long.any() else num_reqs
        lens = query_lens.tolist(), seq_lens.tolist()
        requests = StepRequests(*lens, (), list(common.req_idx[:num_reqs]), num_decodes, segment_len)
        num_blocks = -(-int(seq_lens.max()) // self.steps.layout.block_tokens)
        block_table = common.block_table_tensor[:num_reqs, :num_blocks].contiguous()
        table = self.steps.table(requests, np.empty((0, 0), dtype=np.int32))
        if self.stack.num_drafts:
            expected = table.first_position + table.num_tokens
            table = table._replace(num_rejected=expected - common.seq_lens[:num_reqs])
        table = table._replace(block_table=block_table, states=self._states_of(block_table))
        # The cache has all of vLLM's blocks.
        return self.steps.step(table, requests, 0, self.workspace)

    def _static_step(self, common: Any) -> StepMetadata:
        """Return a step of decodes of as many tokens each that reads vLLM's memory. Padding has a length of 0 there."""
        num_reqs, query_len = common.num_reqs, common.max_query_len
        block_table, seq_lens = common.block_table_tensor[:num_reqs], common.seq_lens[:num_reqs]
        num_rows = num_reqs * query_len
        starts = torch.arange(0, num_rows + 1, query_len, dtype=torch.int32, device=self.device)
        table = table_of_lengths(seq_lens, starts, block_table)._replace(states=self._states_of(block_table))
        tokens = StepTokens.empty(num_rows, self.device)
        lay_out(table, tokens, self.steps.layout)
        return StepMetadata(
            layout=self.steps.layout,
            table=table,
            tokens=tokens,
            num_tokens=num_rows,
            num_decode_tokens=num_rows,
            num_decodes=num_reqs,
            num_blocks=0,
            max_seq_len=self.vllm_config.model_config.max_model_len,
            decode=DecodeMetadata(block_table, tokens.local_seq_lens, None, query_len, self.workspace),
        )
