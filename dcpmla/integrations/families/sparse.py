"""Families of sparse MLA: DeepSeek-V3.2 and GLM-5, on which the families in other files build."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from dcpmla.attention.mla.latent_spec import LatentSpec
from dcpmla.attention.spec import LayerSpec
from dcpmla.config import MLAConfig
from dcpmla.fields import list_of, one_of, optional
from dcpmla.indexer_config import IndexerConfig
from dcpmla.integrations.families.family import Family

# Names of layers of sparse MLA in layer_types: transformers 5.24 has the first, 5.17 the second.
SPARSE_LAYERS = ("indexed_attention", "deepseek_sparse_attention")
LAYER_RULES = {  # of families that have the fields
    "layer_types": optional(list_of(one_of(SPARSE_LAYERS))),
    "mlp_layer_types": optional(list_of(one_of(("dense", "sparse")))),
}


@dataclass(frozen=True)
class SparseFamily(Family):
    """A family whose layers have indexers, or reuse the selection of the layer before.

    Attributes:
        rope_interleaved: Layout of an indexer's rotated columns where the config has no indexer_rope_interleave.
            GLM publishes the field as true; vLLM and SGLang read it, transformers ignores it (pull request 46842).
            DeepSeek-V3.2 has no such field, and rotates halves since its commit 8631a813.
    """

    rope_interleaved: bool = False

    def mla(self, config: Any) -> MLAConfig:
        """Return the geometry of layers with an indexer."""
        return replace(super().mla(config), indexer=read_indexer(config, self.rope_interleaved))

    def layers(self, config: Any, mla: MLAConfig, has_mtp: bool) -> Iterable[LayerSpec]:
        """Return sparse MLA.

        Raises:
            ValueError: Layers reuse a selection that no layer makes.
        """
        return (LatentSpec(mla, each == "full") for each in _indexer_types(config)[: config.num_hidden_layers])

    def with_mtp_layer(self, config: Any) -> Any:
        """Return a config with the MTP module's decoder layer, which has an indexer."""
        types = _indexer_types(config)
        config = super().with_mtp_layer(config)
        config.indexer_types = [*types, "full"]
        return config


def read_indexer(config: Any, rope_interleaved: bool = True) -> IndexerConfig:
    """Return the geometry of a transformers config's indexers.

    Args:
        rope_interleaved: Layout of rotated columns where the config has no indexer_rope_interleave.
    """
    interleaved = getattr(config, "indexer_rope_interleave", None)
    return IndexerConfig(
        num_heads=config.index_n_heads,
        head_dim=config.index_head_dim,
        topk=config.index_topk,
        rope_interleaved=rope_interleaved if interleaved is None else interleaved,
    )


def _indexer_types(config: Any) -> list[str]:
    """Return for each layer whether it selects ("full") or reuses the selection before it ("shared").

    The first field in the config decides: indexer_types, index_topk_pattern ("FSSF"), or index_topk_freq,
    which makes every so-many-th layer after the first index_skip_topk_offset - 1 select.

    Source: GLM-5's config in transformers, whose names vLLM reads for DeepSeek-V3.2 as well.
    """
    num_layers, types, source = config.num_hidden_layers, getattr(config, "indexer_types", None), "indexer_types"
    pattern, freq = getattr(config, "index_topk_pattern", None), getattr(config, "index_topk_freq", None) or 1
    if types is None and pattern is not None:
        types, source = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern], "index_topk_pattern"
    if types is None:
        offset, source = getattr(config, "index_skip_topk_offset", None), "index_topk_freq and index_skip_topk_offset"
        first = 1 if offset is None else offset - 1
        types = ["shared" if max(layer - first, 0) % freq else "full" for layer in range(num_layers)]
    if len(types) < num_layers or types[:1] != ["full"] or set(types) - {"full", "shared"}:
        raise ValueError(
            f"model: the config's {source} give {types}; each of {num_layers} layers has one, full or shared, and the "
            f"first is full"
        )
    return types
