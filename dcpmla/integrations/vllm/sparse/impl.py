"""The attention of one of vLLM's layers of sparse MLA."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from dcpmla.attention.select.selector import selected_rows
from dcpmla.attention.select.step import SelectedTokens
from dcpmla.cache.formats import FP8, row_width
from dcpmla.integrations.vllm.impl import DCPMLAImpl
from dcpmla.integrations.vllm.sparse.names import DeepseekV32Indexer, SharedTopkIndicesBuffer
from dcpmla.integrations.vllm.sparse.selection import IndexBackend, install, selection_of
from dcpmla.runtime.graph_sizes import warm_up_sizes


class DCPMLASparseImpl(DCPMLAImpl, SharedTopkIndicesBuffer):
    """The attention to selected tokens that vLLM's layers call, or to all tokens where none has more than topk before
    it. vLLM's layer makes its own index cache; this package reads it.

    Raises:
        ValueError: The layer or the job asks for an unsupported feature.
    """

    is_sparse = True
    masked_mha_available: ClassVar = False  # because vLLM's kernel for masks is for Blackwell
    indexer_class: ClassVar[Any] = DeepseekV32Indexer
    index_backend: ClassVar[type] = IndexBackend
    models: ClassVar = "DeepSeek-V3.2 and GLM-5"

    def __init__(
        self,
        *args: Any,
        indexer: Any = None,
        topk_indices_buffer: Tensor | None = None,
        index_group_builder: object = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, indexer=indexer, **options)
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)
        # Queries stay as they are over rows whose parts have scales of their own.
        self.supports_quant_query_input = self.kv_cache_dtype != "fp8_ds_mla"
        self.install()
        if indexer is None:
            return
        if not isinstance(indexer, self.indexer_class):
            raise ValueError(
                f"dcpmla's backend for sparse MLA selects for {self.models} here; this model has a "
                f"{type(indexer).__module__}.{type(indexer).__name__}: choose another --attention-backend"
            )
        indexer.k_cache.get_attn_backend = lambda: self.index_backend

    def install(self) -> None:
        """Make vLLM's layers select with this package."""
        install()

    def record_logical_topk_ready(self) -> None:
        """Do nothing: attention follows the selection in the same stream."""

    def prepare_for_batch(self, attn_metadata: Any) -> None:
        """Do nothing: a step's metadata have everything."""

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor]:
        """Attend with absorbed queries as `DCPMLAImpl.forward_mqa` does, but to selected tokens."""
        parts, cache = attn_metadata.decode.parts, kv_c_and_k_pe_cache
        if not attn_metadata.selects:
            return self.attend_in_parts(q, cache, parts, layer)
        selection = self._selection()
        selected = [(tokens, selected_rows(cache, selection.rows(tokens), step.workspace)) for tokens, step in parts]
        rows = selected[0][1][0]
        return self.attend_in_parts(q, rows, [(tokens, step) for tokens, (_, step) in selected], layer)

    def selected_positions(self, attn_metadata: Any, num_tokens: int) -> Tensor | None:
        """Return the positions that prefill tokens selected [num_tokens, topk] int32; None if they attend to all."""
        if not attn_metadata.selects:
            return None
        first = attn_metadata.num_decode_tokens
        return self._selection().positions[first : first + num_tokens]

    def warm_up_selected(
        self, layer: Any, cache_dtype: torch.dtype, workspace: Tensor | None, most_tokens: int
    ) -> None:
        """Attend to selected tokens in steps of every size of decodes. Collective.

        Args:
            layer: Layer of this attention in vLLM.
            cache_dtype: Format of its cache.
            workspace: Memory of decode (`decode_workspace`).
            most_tokens: Most tokens of a step of decodes.
        """
        rank, rope, device = self.kv_lora_rank, self.qk_rope_head_dim, self._selection().positions.device
        cache = torch.zeros(1, 16, row_width(cache_dtype, rank, rope), dtype=cache_dtype, device=device)
        for num_tokens in warm_up_sizes(most_tokens):
            selection = self._selection().rows(slice(0, num_tokens))
            selection.slots.zero_()
            selection.num_slots.fill_(1)
            q: Any = torch.zeros(num_tokens, self.num_heads, rank + rope, dtype=self.dtype, device=device)
            if cache_dtype == FP8:
                q = q.to(FP8)
            elif layer.dcp_manager is None:
                q = q.new_zeros(self.num_heads, num_tokens, rank).transpose(0, 1), q[..., rank:]  # vLLM's layout
            rows, step = selected_rows(cache, selection, workspace)
            self.attend_in_parts(q, rows, [(slice(0, num_tokens), step)], layer)

    def _selection(self) -> SelectedTokens:
        """Return the memory of the selection that this layer attends to."""
        assert self.topk_indices_buffer is not None
        return selection_of(self.topk_indices_buffer)
