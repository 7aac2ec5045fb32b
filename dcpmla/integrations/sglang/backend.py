"""The attention backend that SGLang calls: a step's metadata once, then each layer's decode or prefill."""

import logging
from copy import copy
from typing import Any, Self

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor

from dcpmla.attention.mla.decode import dcp_mla_decode, decode_call
from dcpmla.attention.mla.prefill import dcp_mla_prefill
from dcpmla.attention.step.chunks import PrefillMetadata
from dcpmla.attention.step.metadata import DecodeMetadata
from dcpmla.cache.formats import FP8, write_latents
from dcpmla.comm.exchange import Exchange, LocalExchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.absorbed import TokenRange
from dcpmla.integrations.sglang.checks import check
from dcpmla.integrations.sglang.exchange import exchange_of
from dcpmla.integrations.sglang.metadata import MAX_ABSORBED, MetadataBuilder, is_prefill
from dcpmla.integrations.warm_up import LayerSizes, warm_up

logger = logging.getLogger(__name__)


class Backend(AttentionBackend):
    """Attention of one rank's layers over latents that SGLang caches for its DCP group, for a model or its drafts.

    SGLang's layers call it as they do without DCP, with this rank's heads; gathers and merges happen inside.

    Args:
        runner: SGLang's ModelRunner, its model loaded and its cache allocated.
    Raises:
        ValueError: The backend does not support an option or the model.
    """

    needs_cpu_seq_lens = False
    parts: tuple[TokenRange, ...]
    prefill: PrefillMetadata

    def __init__(self, runner: Any) -> None:
        super().__init__()
        parallel = get_parallel()
        check(runner, parallel)
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.kv_index_translator = runner.kv_index_translator
        self.page_size, self.device = runner.page_size, torch.device(runner.device)
        self.num_ahead = 0
        dcp = DCPConfig(
            tensor_parallel_size=parallel.attn_tp_size,
            decode_context_parallel_size=parallel.attn_dcp_size,
            block_size=self.page_size,
        )
        self.exchange: Exchange = LocalExchange()
        if parallel.attn_dcp_size > 1:
            self.exchange = exchange_of(parallel.dcp_group.device_group, self.device)
        pool = self.token_to_kv_pool
        width = pool.kv_lora_rank + pool.qk_rope_head_dim
        self.exchange.reserve_context(dcp.context_workspace_tokens, width, pool.dtype, self.device)
        self.kv_scale = torch.ones(1, device=self.device) if pool.dtype == FP8 else None  # SGLang casts, scale 1
        layer = take_over(runner.model)[0]
        self.max_query_len = get_spec().speculative_num_draft_tokens or 1
        heads = layer.num_local_heads * parallel.attn_dcp_size
        table = self.req_to_token_pool.req_to_token
        self.builder = MetadataBuilder(dcp, parallel.attn_dcp_rank, table, heads, self.max_query_len)
        mask = torch.zeros(len(table) * self.max_query_len**2, dtype=torch.bool, device=self.device)
        self.mask = VerifyMask(mask, TreeMaskMode.QLEN_ONLY, len(table), is_read=False)
        if not runner.is_draft_worker:  # a draft's layers run the kernels that the model's have compiled
            self._warm_up(layer, runner.dtype, runner.max_running_requests)

    def ahead(self, num_tokens: int) -> Self:
        """Return the backend of a draft's step, after which requests have num_tokens unverified tokens."""
        step = copy(self)
        step.num_ahead = num_tokens
        return step

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Lay out prompts."""
        if is_prefill(forward_batch):
            self.prefill = self.builder.prefill(forward_batch)
        elif forward_batch.forward_mode.is_extend_without_speculative():
            self.parts = self.builder.short_prefills(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Lay out decodes and drafts by operations on the device, which a graph records and replays."""
        mode, query_len = forward_batch.forward_mode, self.max_query_len
        if mode.is_decode():
            self.parts = self.builder.decodes(forward_batch, 1, self.num_ahead)
        elif mode.is_target_verify():  # the tokens to be verified are not counted yet
            self.parts = self.builder.decodes(forward_batch, query_len, query_len)
        elif mode.is_draft_extend_v2():
            self.parts = self.builder.decodes(forward_batch, query_len, 0)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Do nothing: a graph's metadata is in its own memory."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1  # padding reads the first token of SGLang's spare page

    @property
    def verify_mask(self) -> VerifyMask:
        """Return memory of the mask between drafts, which SGLang writes and nothing reads: drafts are a chain."""
        return self.mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Do nothing: no metadata depends on drafts."""

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor | None, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """Attend from absorbed queries [T, h (L + R)] to all ranks' tokens: return [T, h L]. Collective.

        Args:
            k: [T, 1, L + R], the new tokens' latents.
            layer: RadixAttention of SGLang.
        """
        rank, cache = self.token_to_kv_pool.kv_lora_rank, self._cache(layer)
        if save_kv_cache:
            self._write(layer, k[..., :rank], k[..., rank:], forward_batch)
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = [self._decode(q[tokens], cache, step, layer.scaling) for tokens, step in self.parts]
        return (out[0] if len(out) == 1 else torch.cat(out)).flatten(1)

    def prepare_prefill_qkv(
        self, q: Tensor, q_pe: Tensor, kv_a: Tensor, k_pe: Tensor, positions: Tensor, layer: Any, forward_batch: Any
    ) -> tuple[Tensor, None, None]:
        """Rotate and cache new tokens, and keep the inputs of their keys and values for `forward_extend`.

        Args:
            q, q_pe: [T, h, P + R], and its last R columns, not rotated.
            kv_a, k_pe: [T, L] after its norm, [T, 1, R] not rotated.
            layer: SGLang's DeepseekV2AttentionMLA.
        Returns:
            q rotated, and no keys and values.
        """
        if layer.rotary_emb is not None:
            q_pe, k_pe = layer.rotary_emb(positions, q_pe, k_pe)
            q[..., layer.qk_nope_head_dim :] = q_pe
        self._write(layer.attn_mha, kv_a.unsqueeze(1), k_pe, forward_batch)
        self.new_tokens = kv_a, k_pe[:, 0], lambda kv_c: layer.kv_b_proj(kv_c)[0]
        return q, None, None

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """Attend from the prepared tokens' queries [T, h, P + R] to themselves and to all ranks' tokens before them:
        return [T, h V]. Or, where there are keys, as `forward_decode`. Collective.
        """
        if k is not None:
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        kv_c, k_pe, up_projection = self.new_tokens
        rows = slice(0, q.shape[0])  # SGLang leaves padding out
        arguments = kv_c[rows], k_pe[rows], self._cache(layer), up_projection, self.prefill, layer.scaling
        return dcp_mla_prefill(q, *arguments, self.exchange, self.kv_scale)[0].flatten(1)

    def _decode(self, q: Tensor, cache: Tensor, step: DecodeMetadata, scale: float) -> Tensor:
        rank = self.token_to_kv_pool.kv_lora_rank
        q = self.exchange.gather_heads(q)
        return dcp_mla_decode(decode_call(q, cache, step, scale, rank, kv_scale=self.kv_scale), self.exchange)[0]

    def _warm_up(self, layer: Any, dtype: torch.dtype, max_num_seqs: int) -> None:
        """Attend in every way that a DeepseekV2AttentionMLA does. Collective."""
        pool, builder = self.token_to_kv_pool, self.builder
        widths = pool.kv_lora_rank, layer.qk_nope_head_dim, pool.qk_rope_head_dim

        def decode(q: Tensor, cache: Tensor, step: DecodeMetadata) -> None:
            self._decode(q, cache, step, layer.scaling)

        def prefill(q: Tensor, kv_c: Tensor, k_pe: Tensor, cache: Tensor, step: PrefillMetadata) -> None:
            arguments = kv_c, k_pe, cache, lambda rows: layer.kv_b_proj(rows)[0], step, layer.scaling
            dcp_mla_prefill(q, *arguments, self.exchange, self.kv_scale)

        sizes = LayerSizes(layer.num_local_heads, *widths, dtype, pool.dtype)
        layout = builder.layout
        segments = layout.segment_len, layout.max_segments(max_num_seqs, max_num_seqs * MAX_ABSORBED)
        arguments = sizes, builder.steps, layout.workspace, max_num_seqs, self.max_query_len, *segments
        warm_up(decode, prefill, *arguments)

    def _cache(self, layer: Any) -> Tensor:
        """Return a layer's cache [pages, page_size, L + R] on this rank."""
        rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        return rows.view(-1, self.page_size, rows.shape[-1])

    def _write(self, layer: Any, kv_c: Tensor, k_pe: Tensor, forward_batch: Any) -> None:
        """Cache the new tokens [T, 1, L] and [T, 1, R] that are this rank's."""
        if kv_c.is_cuda:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), kv_c, k_pe)
        else:  # SGLang's kernel does not run on a CPU
            write_latents(self._cache(layer), kv_c[:, 0], k_pe[:, 0], self.builder.slots(forward_batch), self.kv_scale)


def take_over(model: Any) -> list[Any]:
    """Have the model's attention layers call the backend as they do without DCP, and lay out nothing for DCP; return
    these layers.
    """
    layers = [module for module in model.modules() if hasattr(module, "attn_mqa")]
    for layer in layers:
        layer.dcp_size = 1
    model.prepare_context_parallel_metadata_for_dcp = lambda *_: None
    return layers
