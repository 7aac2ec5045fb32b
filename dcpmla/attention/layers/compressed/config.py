"""The geometry of DeepSeek-V4's and V4.1's attention: a window and compressed entries, over one shared head of keys
and values.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, NamedTuple

from dcpmla.config import DCPConfig
from dcpmla.fields import Flag, Rule, Size, check_fields, check_tp_size, instance_of, number, rules_of
from dcpmla.indexer_config import IndexerConfig


class LayerKind(NamedTuple):
    """The entries that a layer attends to besides its window.

    Attributes:
        ratio: Number of tokens of an entry; 0 for a layer without entries.
        has_indexer: Whether an indexer of the layer's own selects among them (CSA); else attention reads all (HCA).
        writes: Whether the layer writes the entries; else it reads what the latest writer before it wrote.
        reuses: Whether the layer attends to the selection of the latest indexer, without one of its own.
        candidates: "source" for an indexer that also chooses candidate blocks, "within" for a later one, which selects
            among these blocks, else empty (`CandidateConfig`).
        block: Number of tokens of a block of drafts, which all see the window before the block and the whole block
            (DSpark); 0 for a layer whose tokens see those up to themselves.
    """

    ratio: int
    has_indexer: bool
    writes: bool = True
    reuses: bool = False
    candidates: str = ""
    block: int = 0

    @property
    def selects(self) -> bool:
        """Return whether tokens attend to selected entries."""
        return self.has_indexer or self.reuses

    @property
    def seen(self) -> tuple[int, int]:
        """Return ratio and block, on which the rows depend that tokens see without a selection."""
        return self.ratio, self.block

    @property
    def label(self) -> str:
        """The name of the kind: "window", "csa" or "hca"."""
        return ("csa" if self.selects else "hca") if self.ratio else "window"


WINDOW_ONLY = LayerKind(0, False)
_KINDS = Rule(
    "LayerKinds of a ratio of at least 2, of 1 with a selection, or of 0 without an indexer, and blocks of these alone",
    lambda value: isinstance(value, tuple) and value != () and all(map(_is_kind, value)),
)


def _is_kind(value: object) -> bool:
    if not isinstance(value, LayerKind) or value.block < 0:
        return False
    return value._replace(block=0) == WINDOW_ONLY or (value.ratio >= 2 - value.selects and not value.block)


class CandidateConfig(NamedTuple):
    """The blocks of entries that later indexers select among.

    Attributes:
        num_blocks: Number of blocks of a token: the best by their scores, and the last one.
        block_size: Number of consecutive entries of a block; its score is the best of theirs.
    """

    num_blocks: int
    block_size: int


@dataclass(frozen=True, kw_only=True)
class CompressedConfig:
    """Geometry and constants of the attention layers of a model, before any sharding.

    Attributes:
        head_dim, rope_dim: Width of queries, keys and values, and number of their last columns that are rotated, as
            pairs (2i, 2i+1).
        o_groups, o_lora_rank: Groups of neighbouring heads, and rank of the output projection that each group shares.
        sliding_window: Number of last tokens that each token attends to, itself included.
        indexer: Sizes of the indexers.
        layer_kinds: Kind of each layer.
        norms_queries: Whether each head's query is normalized.
        has_entry_keys: Whether index keys are projected from entries, which do not overlap then and whose gates have no
            bias (DeepSeek-V4.1); else they are pooled from hidden states, as the entries are, and both overlap.
        candidates: Candidate blocks; None if indexers select among all entries.
    Raises:
        ValueError: A field has another type or is outside its range, or sizes do not match.
    Source: DeepSeek-V4's report, section 2.3; vLLM's DeepSeek-V4.1.
    """

    hidden_size: Size
    num_heads: Size
    head_dim: Size
    rope_dim: Size
    q_lora_rank: Size
    o_groups: Size
    o_lora_rank: Size
    sliding_window: Size
    rms_norm_eps: Annotated[float, number(0)]
    indexer: Annotated[IndexerConfig, instance_of(IndexerConfig)]
    layer_kinds: Annotated[tuple[LayerKind, ...], _KINDS]
    norms_queries: Flag = True
    has_entry_keys: Flag = False
    candidates: CandidateConfig | None = None

    def __post_init__(self) -> None:
        check_fields(rules_of(CompressedConfig), vars(self))
        if self.head_dim % 2 or self.indexer.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim} and the indexer's {self.indexer.head_dim}; both must be even, as "
                "columns are rotated as pairs"
            )
        if self.rope_dim % 2 or self.rope_dim > min(self.head_dim, self.indexer.head_dim):
            raise ValueError(
                f"rope_dim is {self.rope_dim}; it must be even, and at most head_dim {self.head_dim} and the indexer's "
                f"{self.indexer.head_dim}"
            )
        if self.num_heads % self.o_groups:
            raise ValueError(f"o_groups is {self.o_groups}; it must divide num_heads {self.num_heads}")
        self._check_sharing()

    def _check_sharing(self) -> None:
        """Raise ValueError unless each layer that shares entries or a selection comes after a layer that makes them."""
        written = selected = None
        for layer, kind in enumerate(self.layer_kinds):
            written = kind.ratio if kind.ratio and kind.writes else written
            selected = kind.ratio if kind.has_indexer else selected
            if kind.ratio and (kind.ratio != written or (kind.reuses and kind.ratio != selected)):
                raise ValueError(
                    f"layer_kinds[{layer}] is {kind}; the latest entries have ratio {written} and the latest selection "
                    f"{selected}, which must be the layer's"
                )

    @property
    def softmax_scale(self) -> float:
        """Factor of the attention scores."""
        return self.head_dim**-0.5

    @property
    def ratios(self) -> tuple[int, ...]:
        """The distinct ratios of layers that compress, ascending."""
        return tuple(sorted({kind.ratio for kind in self.layer_kinds} - {0}))

    @cached_property
    def row_groups(self) -> dict[int, tuple[int, ...]]:
        """The layers that share rows, by the number of the first, which writes the entries."""
        groups: dict[int, tuple[int, ...]] = {}
        source = 0
        for layer, kind in enumerate(self.layer_kinds):
            source = layer if kind.ratio and kind.writes else source
            first = source if kind.ratio else layer
            groups[first] = (*groups.get(first, ()), layer)
        return groups

    @cached_property
    def rings(self) -> tuple[int, ...]:
        """The index of each layer's windows in the rows that it shares, in the order of the layers."""
        numbers = {layer: ring for group in self.row_groups.values() for ring, layer in enumerate(group)}
        return tuple(numbers[layer] for layer in range(len(self.layer_kinds)))

    def num_rings(self, ratio: int) -> int:
        """Return how many layers' windows the rows of a ratio begin with; the same for all groups of the ratio, so that
        layers of several groups may share a selection's slots.
        """
        sizes = [len(group) for first, group in self.row_groups.items() if self.layer_kinds[first].ratio == ratio]
        return max([1, *sizes])

    @property
    def draft_block(self) -> int:
        """Number of tokens of a block of drafts; 0 if no layer drafts."""
        return max(kind.block for kind in self.layer_kinds)

    def num_halves(self, kind: LayerKind) -> int:
        """Return how many entries a token is pooled into: two if entries overlap, else one."""
        return 2 if kind.has_indexer and not self.has_entry_keys else 1

    @property
    def row_tokens(self) -> int:
        """Tokens per entry of the smallest ratio: a block of n rows covers n times as many on a rank."""
        return min(self.ratios, default=1)

    def heads_per_rank(self, tensor_parallel_size: int) -> int:
        """Return the number of heads of one TP rank, a whole number of groups.

        Raises:
            ValueError: The groups do not divide; the message lists sizes that do.
        """
        groups = f"the {self.o_groups} groups of the model's {self.num_heads} attention heads"
        check_tp_size(tensor_parallel_size, self.o_groups, groups)
        return self.num_heads // tensor_parallel_size

    def chunk_alignment(self, dcp: DCPConfig) -> int:
        """Return how many tokens a request's part of the workspace for contexts is a multiple of."""
        dcp = self.with_whole_blocks(dcp)
        ranks = dcp.decode_context_parallel_size * dcp.cp_kv_cache_interleave_size
        return math.lcm(dcp.block_size * self.row_tokens, ranks)

    def moves_queries(self, dcp: DCPConfig, num_tokens: int, num_entries: int) -> bool:
        """Return whether queries and outputs of all heads of the DCP group are fewer rows than the entries."""
        num_heads = self.heads_per_rank(dcp.tensor_parallel_size) * dcp.decode_context_parallel_size
        return 2 * num_tokens * num_heads < num_entries

    def check_layout(self, dcp: DCPConfig) -> None:
        """Raise ValueError for options that these layers do not have, or blocks that do not hold whole entries."""
        refused = (
            ("kv_cache_dtype (--kv-cache-dtype) fp8", dcp.kv_cache_dtype == "fp8", "choose auto, bf16 or fp8_ds_mla"),
            ("dcp_project_before_merge (--dcp-project-before-merge)", dcp.dcp_project_before_merge, "leave it out"),
            ("deterministic (--deterministic)", dcp.deterministic, "leave it out"),
        )
        for name, is_asked, advice in refused:
            if is_asked:
                raise ValueError(f"{name} does not go with DeepSeek-V4's attention; {advice}")
        dcp = self.with_whole_blocks(dcp)
        granule = math.lcm(1, *self.ratios) * dcp.cp_kv_cache_interleave_size
        if dcp.block_size * self.row_tokens % granule:
            raise ValueError(
                f"block_size (--block-size) is {dcp.block_size}; {self.row_tokens} times as many tokens must be whole "
                f"entries of each ratio in {self.ratios} (the config's compress_rates), in groups of "
                f"{dcp.cp_kv_cache_interleave_size} (--cp-kv-cache-interleave-size): a multiple of "
                f"{granule // self.row_tokens}"
            )

    def with_whole_blocks(self, dcp: DCPConfig) -> DCPConfig:
        """Return the layout of entries: its interleave is whole candidate blocks, so that each block is on one rank.

        Raises:
            ValueError: A cache's block does not hold whole candidate blocks, in groups of the interleave.
        """
        if self.candidates is None:
            return dcp
        interleave = math.lcm(dcp.cp_kv_cache_interleave_size, self.candidates.block_size)
        if dcp.block_size % interleave:
            raise ValueError(
                f"block_size (--block-size) is {dcp.block_size}; it must be a multiple of {interleave}, of candidate "
                f"blocks of {self.candidates.block_size} entries (the config's candidate_block_size) and of "
                f"cp_kv_cache_interleave_size (--cp-kv-cache-interleave-size) {dcp.cp_kv_cache_interleave_size}"
            )
        return replace(dcp, cp_kv_cache_interleave_size=interleave)
