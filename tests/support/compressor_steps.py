"""Steps of DeepSeek-V4 for tests of the compressor."""

from dcpmla.attention.layers.compressed.cache import CompressedPlan
from dcpmla.attention.layers.compressed.config import CompressedConfig, LayerKind
from dcpmla.attention.layers.compressed.step import CompressedMetadata, compressed_traits
from dcpmla.attention.select.entries import PoolUpdate, pool_updates
from dcpmla.attention.step.metadata import StepBuilder
from dcpmla.attention.step.table import StepRequests
from dcpmla.indexer_config import IndexerConfig


def tables_of(plan: CompressedPlan, totals: list[int]) -> list[list[int]]:
    blocks = iter(range(plan.num_blocks))
    return [[next(blocks) for _ in range(-(-total // plan.block_tokens))] for total in totals]


def config_of(kind: LayerKind, width: int, rope: int, has_entry_keys: bool = False) -> CompressedConfig:
    return CompressedConfig(
        hidden_size=8,
        num_heads=12,  # a multiple of all sizes of a group
        head_dim=width,
        rope_dim=rope,
        q_lora_rank=8,
        o_groups=12,
        o_lora_rank=8,
        sliding_window=8,
        rms_norm_eps=1e-3,
        indexer=IndexerConfig(num_heads=1, head_dim=width, topk=4, rope_interleaved=True),
        layer_kinds=(kind,),
        has_entry_keys=has_entry_keys,
    )


def decodes_first(plan: CompressedPlan, new: tuple[int, ...]) -> list[int]:
    return sorted((i for i, count in enumerate(new) if count), key=lambda i: new[i] > 1 + plan.num_drafts)


def build(
    plan: CompressedPlan, rank: int, new: tuple[int, ...], done: list[int], tables: list[list[int]]
) -> tuple[CompressedMetadata, tuple[PoolUpdate, ...]]:
    order = decodes_first(plan, new)
    ends = [done[i] + new[i] for i in order]
    requests = StepRequests([new[i] for i in order], ends, [tables[i] for i in order], [2 - i for i in order])
    step = StepBuilder(plan.dcp, rank, "cpu", compressed_traits(plan)).build(requests, 1 + plan.num_drafts)
    return CompressedMetadata.of(step), pool_updates(step, step.tokens.positions)
