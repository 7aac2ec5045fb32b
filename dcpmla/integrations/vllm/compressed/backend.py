"""vLLM's attention backend for DeepSeek-V4: the metadata of a step, from numbers of vLLM."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dcpmla import ownership
from dcpmla.attention.build import GraphRows, HostStep
from dcpmla.attention.calls import decode_workspace
from dcpmla.attention.chunks import positions_of
from dcpmla.attention.compressed.build import CompressedStepBuilder
from dcpmla.attention.compressed.step import with_angles
from dcpmla.attention.step import DecodeMetadata, StepMetadata, StepRequests
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

    @cached_property
    def step(self) -> StepMetadata:
        """The step as all layers see it."""
        return self._build()


class CompressedMetadataBuilder(AttentionMetadataBuilder):
    """The metadata of each step.

    A request's state in the cache has the number of the request in the worker's table. It keeps this number from the
    step that admits it, or that resumes it after a preemption, to its end. A dummy request, in warm-ups and idle ranks,
    has no blocks but vLLM's null block, and gets no state.

    Full graphs of decode read block tables and lengths where vLLM keeps them, and states where this builder does.
    """

    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        (leader,) = layer_names
        self.stack = vllm_config.compilation_config.static_forward_context[leader].stack
        self.workspace = decode_workspace(device)
        num_seqs = vllm_config.scheduler_config.max_num_seqs
        self.states = torch.full((num_seqs,), -1, dtype=torch.int32, device=device)

    @cached_property
    def steps(self) -> CompressedStepBuilder:
        """The builder of steps over the cache, which vLLM allocates after this object."""
        return CompressedStepBuilder(self.stack.cache.sizes, self.stack.placement.mesh.dcp_rank, self.device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> LazyStep:
        """Return a step of decodes, then prefills, then padding."""
        self._write_states(common_attn_metadata)
        return LazyStep(lambda: self._with_angles(self._step(common_attn_metadata)))

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> LazyStep:
        """Return a step of decodes alone over memory that stays in place."""
        self._write_states(common_attn_metadata)
        return LazyStep(lambda: self._with_angles(self._static_step(common_attn_metadata)))

    def _with_angles(self, step: StepMetadata) -> StepMetadata:
        return with_angles(step, self.stack.rotary)

    def _write_states(self, common: Any) -> None:
        """Write the state of each request into memory that graphs read; -1 for padding."""
        numbers = np.full(len(self.states), -1, dtype=np.int32)
        numbers[: len(common.req_idx)] = common.req_idx
        self.states.copy_(upload([numbers], self.device)[0], non_blocking=True)

    def _states_of(self, table: Tensor) -> Tensor:
        """Return the states of the requests with this block table [n, max_blocks]: -1 for dummies, whose blocks are
        vLLM's null block.
        """
        return self.states[: len(table)].where(table[:, 0] > 0, -1)

    def _step(self, common: Any) -> StepMetadata:
        """Return a step of any requests. vLLM's bounds of lengths on the host are exact without drafts."""
        query_lens = common.query_start_loc_cpu.diff().numpy()
        num_reqs = int((query_lens > 0).sum())  # padding comes last
        query_lens = query_lens[:num_reqs]
        seq_lens = common.seq_lens_cpu_upper_bound[:num_reqs].numpy()
        num_decodes = int((query_lens > 1).argmax()) if (query_lens > 1).any() else num_reqs
        states = np.asarray(common.req_idx[:num_reqs], dtype=np.int32)
        request = np.repeat(np.arange(num_reqs, dtype=np.int32), query_lens)
        positions = positions_of(query_lens.tolist(), seq_lens.tolist())
        requests = StepRequests(query_lens.tolist(), seq_lens.tolist(), (), states.tolist())
        host = HostStep(requests, num_decodes, num_decodes, np.empty((0, 0)), request, positions)
        num_blocks = -(-int(seq_lens.max()) // self.steps.block_tokens)
        table = common.block_table_tensor[:num_reqs, :num_blocks].contiguous()
        arrays = [positions, self.steps.local_seq_lens(positions[:num_decodes]), *self.steps.columns(host)]
        on_device, local_seq_lens, of_request, numbers = upload(arrays, self.device)
        numbers[2] = self._states_of(table)
        step = self._layout(on_device, local_seq_lens, table, num_decodes)
        return self.steps.extend(step, host, table, [of_request, numbers])

    def _static_step(self, common: Any) -> StepMetadata:
        """Return a step of decodes that reads vLLM's memory. Padding has a length of 0 there."""
        num_reqs = common.num_reqs
        table, seq_lens = common.block_table_tensor[:num_reqs], common.seq_lens[:num_reqs]
        positions = (seq_lens - 1).clamp(min=0).long()
        local = self._local(seq_lens)
        rows = GraphRows(
            query_len=1,
            max_seq_len=self.vllm_config.model_config.max_model_len,
            block_table=table,
            states=self._states_of(table),
            request=torch.arange(num_reqs, dtype=torch.int32, device=self.device),
            positions=positions,
            seq_lens=seq_lens,
            local_seq_lens=local,
        )
        return self.steps.extend_graph(self._layout(positions, local, table, num_reqs), rows)

    def _local(self, seq_lens: Tensor) -> Tensor:
        dcp = self.steps.dcp
        size, interleave = dcp.decode_context_parallel_size, dcp.cp_kv_cache_interleave_size
        return ownership.local_seq_lens(seq_lens, size, self.steps.dcp_rank, interleave)

    def _layout(self, positions: Tensor, local_seq_lens: Tensor, table: Tensor, num_decodes: int) -> StepMetadata:
        decode = None
        if num_decodes:
            decode = DecodeMetadata(table[:num_decodes], local_seq_lens, None, 1, self.workspace)
        return StepMetadata(
            num_tokens=len(positions),
            num_decode_tokens=num_decodes,
            num_blocks=0,  # the cache has all of vLLM's blocks
            positions=positions,
            slot_mapping=positions.new_full((len(positions),), -1),
            decode=decode,
            prefill=None,
        )
