"""The MTP module of a checkpoint, which transformers leaves out: its names, its config and its slices."""

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Self

from torch import Tensor

from dcpmla.attention.layer import MLAAttention
from dcpmla.comm.reduce import Reduce
from dcpmla.hf_config import COMPRESSED_MODEL_TYPES, SPARSE_MODEL_TYPES, indexer_types
from dcpmla.integrations.parts import Parts
from dcpmla.model.block import DecoderBlock
from dcpmla.model.mtp import MtpLayer
from dcpmla.parallel.linear import Linear, read_linear, read_weight

_PER_LAYER = ("mlp_layer_types", "layer_types")  # lists of a config with an entry a layer
_ATTENTION, _MLP = "model.layers.0.self_attn.0.", "model.layers.0.mlps.0."  # in LongCat
_NO_MODULE = "leave --speculative-method mtp out, or take ngram"


class MtpNames(NamedTuple):
    """Names of a module's weights in a checkpoint."""

    block: str
    mlp: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    output_norm: str

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return the names for a model's config; those of DeepSeek-V3 but in LongCat, whose module has a plain MLP."""
        if config.model_type == "longcat_flash":
            block, mtp = "model.mtp.layers.0", "model.mtp"
            norms = f"{block}.enorm.m.weight", f"{block}.hnorm.m.weight"
            return cls(block, f"{block}.transformer_layer.mlp", *norms, f"{block}.eh_proj.weight", f"{mtp}.norm.weight")
        block = f"model.layers.{config.num_hidden_layers}"
        norms = f"{block}.enorm.weight", f"{block}.hnorm.weight"
        return cls(block, f"{block}.mlp", *norms, f"{block}.eh_proj.weight", f"{block}.shared_head.norm.weight")

    def shapes(self, config: Any, of_model: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights that are in no decoder layer of the model's.

        Args:
            of_model: the model's, by its names (`published_shapes`).
        """
        size = config.hidden_size
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys((self.embedding_norm, self.hidden_norm), (size,))
        shapes |= {self.output_norm: (size,), self.projection: (size, 2 * size)}
        if config.model_type == "longcat_flash":  # its layers have two of each part
            for part, own in ((_ATTENTION, f"{self.block}.self_attn."), (_MLP, f"{self.mlp}.")):
                shapes |= {own + name.removeprefix(part): of_model[name] for name in of_model if name.startswith(part)}
            shapes |= {f"{self.block}.{name}_layernorm.weight": (size,) for name in ("input", "post_attention")}
        return shapes


def check_mtp(config: Any) -> None:
    """Raise ValueError for a model whose family has no MTP module that this package computes."""
    if config.model_type in COMPRESSED_MODEL_TYPES:
        raise ValueError(
            f"speculative_method (--speculative-method) is 'mtp', but the MTP module of {config.model_type} is not "
            f"computed here; take ngram"
        )
    if config.model_type != "longcat_flash" and not getattr(config, "num_nextn_predict_layers", None):
        raise ValueError(
            f"speculative_method (--speculative-method) is 'mtp', but the model's config has no "
            f"num_nextn_predict_layers: {_NO_MODULE}"
        )


def check_mtp_weights(names: Collection[str], shapes: Collection[str]) -> None:
    """Raise ValueError for a checkpoint that lacks one of the module's weights."""
    missing = set(shapes) - set(names)
    if missing:
        raise ValueError(f"checkpoint: tensor {min(missing)} of the MTP module is missing: {_NO_MODULE}")


def with_mtp_layer(config: Any) -> Any:
    """Return a config with a decoder layer more, the module's; LongCat's, whose layers are others, as it is."""
    if config.model_type == "longcat_flash":
        return config
    config = copy.deepcopy(config)
    if config.model_type in SPARSE_MODEL_TYPES:
        config.indexer_types = [*indexer_types(config), "full"]
    for name in _PER_LAYER:
        if isinstance(getattr(config, name, None), list):
            setattr(config, name, [*getattr(config, name), getattr(config, name)[-1]])
    config.num_hidden_layers += 1
    return config


def load_mtp(
    parts: Parts,
    names: MtpNames,
    embedding: Tensor,
    load_attention: Callable[[str], tuple[Any, int]],
    reduce: Reduce,
) -> tuple[MtpLayer, int]:
    """Load the module; return it, and its layer's number in the cache."""
    config = parts.model.config
    size, eps = config.hidden_size, config.rms_norm_eps

    def norm(name: str) -> Tensor:
        return read_weight(parts.weights, name, (size,)).to(parts.device, parts.dtype)

    attention, layer = load_attention(f"{names.block}.self_attn")
    assert isinstance(attention, MLAAttention)
    mlp = parts.dense(names.mlp) if config.model_type == "longcat_flash" else parts.mlp(names.mlp)
    norms = norm(f"{names.block}.post_attention_layernorm.weight"), norm(names.output_norm)
    block = DecoderBlock(attention, mlp, *norms, eps, reduce)
    projection = Linear(2 * size, size, dtype=parts.dtype, device=parts.device)
    projection.load(read_linear(parts.weights, names.projection, (size, 2 * size)))
    input_norms = norm(names.embedding_norm), norm(names.hidden_norm)
    input_norm = norm(f"{names.block}.input_layernorm.weight")
    return MtpLayer(embedding, *input_norms, projection, input_norm, block, eps), layer
