"""Attention to selected tokens: as decode over a cache whose pages have one row each, or as masked MHA."""

from torch import Tensor

from dcpmla.attention.sparse.metadata import SelectedTokens
from dcpmla.attention.step import DecodeMetadata, PrefillMetadata
from dcpmla.config import MLAConfig


def selected_rows(
    kv_cache: Tensor, selection: SelectedTokens, workspace: Tensor | None
) -> tuple[Tensor, DecodeMetadata]:
    """What `dcp_mla_decode` takes to attend to selected tokens: each query token is a request, whose pages are the
    rows selected for it.

    Args:
        kv_cache: [num_blocks, block_size, width], its blocks one behind the other.
        selection: of the query tokens.
        workspace: as in `DecodeMetadata`.
    """
    pages = kv_cache.view(-1, 1, kv_cache.shape[-1])
    return pages, DecodeMetadata(selection.slots, selection.num_slots, None, 1, workspace)


def prefers_mha(prefill: PrefillMetadata, config: MLAConfig) -> bool:
    """Whether masked MHA over all keys costs less than MQA over latents of the selected ones: by products of a
    query and a key's columns.

    The same on all ranks: it follows from global lengths.
    """
    assert config.indexer is not None
    mha = prefill.num_pairs * (config.qk_head_dim + config.v_head_dim)
    mqa = prefill.query_start[-1] * config.indexer.topk * (config.latent_dim + config.kv_lora_rank)
    return mha <= mqa
