"""The MTP module of a checkpoint, which transformers leaves out: its names, its config and its slices."""

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Self

from torch import Tensor

from dcpmla.comm.reduce import Reduce
from dcpmla.integrations.hf_config import COMPRESSED_MODEL_TYPES, SPARSE_MODEL_TYPES, indexer_types
from dcpmla.integrations.parts import Parts
from dcpmla.model.block import DecoderBlock
from dcpmla.model.mtp import MtpLayer
from dcpmla.parallel.linear import Linear, read_linear, read_weight

_PER_LAYER = ("mlp_layer_types", "layer_types")  # lists of a config with an entry a layer
_ATTENTION, _MLP = "model.layers.0.self_attn.0.", "model.layers.0.mlps.0."  # in LongCat
_WINDOW = (0, "sliding_attention")  # entries of compress_ratios and of layer_types
_NO_MODULE = "leave --speculative-method mtp out, or take ngram"


class MtpNames(NamedTuple):
    """Names of a module's weights in a checkpoint.

    Attributes:
        projections: Projections of embeddings and hidden states at once, or one of each.
        collapse: Beginning of the names that collapse streams (DeepSeek-V4); empty in other families.
    """

    block: str
    mlp: str
    embedding_norm: str
    hidden_norm: str
    projections: tuple[str, ...]
    output_norm: str
    collapse: str = ""

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return the names for a model's config; those of DeepSeek-V3 but in LongCat, whose module has a plain MLP."""
        if config.model_type == "longcat_flash":
            block, mtp = "model.mtp.layers.0", "model.mtp"
            norms = f"{block}.enorm.m.weight", f"{block}.hnorm.m.weight"
            mlp = f"{block}.transformer_layer.mlp"
            return cls(block, mlp, *norms, (f"{block}.eh_proj.weight",), f"{mtp}.norm.weight")
        block = f"model.layers.{config.num_hidden_layers}"
        norms = f"{block}.enorm.weight", f"{block}.hnorm.weight"
        if config.model_type in COMPRESSED_MODEL_TYPES:
            projections = f"{block}.e_proj.weight", f"{block}.h_proj.weight"
            return cls(block, f"{block}.mlp", *norms, projections, f"{block}.norm.weight", f"{block}.hc_head_")
        return cls(block, f"{block}.mlp", *norms, (f"{block}.eh_proj.weight",), f"{block}.shared_head.norm.weight")

    def shapes(self, config: Any, of_model: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights that are in no decoder layer of the model's.

        Args:
            of_model: the model's, by its names (`published_shapes`).
        """
        size = config.hidden_size
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys((self.embedding_norm, self.hidden_norm), (size,))
        shapes |= {self.output_norm: (size,)}
        shapes |= dict.fromkeys(self.projections, (size, 2 * size // len(self.projections)))
        if self.collapse:
            num = config.hc_mult
            parts = {"fn": (num, num * size), "base": (num,), "scale": (1,)}
            shapes |= {f"{self.collapse}{part}": shape for part, shape in parts.items()}
        if config.model_type == "longcat_flash":  # its layers have two of each part
            for part, own in ((_ATTENTION, f"{self.block}.self_attn."), (_MLP, f"{self.mlp}.")):
                shapes |= {own + name.removeprefix(part): of_model[name] for name in of_model if name.startswith(part)}
            shapes |= {f"{self.block}.{name}_layernorm.weight": (size,) for name in ("input", "post_attention")}
        return shapes


def check_mtp(config: Any) -> None:
    """Raise ValueError for a model without an MTP module that this package computes."""
    if config.model_type != "longcat_flash" and not getattr(config, "num_nextn_predict_layers", None):
        raise ValueError(
            f"speculative_method (--speculative-method) is 'mtp', but the model's config has no "
            f"num_nextn_predict_layers: {_NO_MODULE}"
        )
    for name, entries in getattr(config, "mtp_attention", {}).items():
        if entries and entries[0] not in _WINDOW:
            raise ValueError(
                f"speculative_method (--speculative-method) is 'mtp', but the config's {name} has {entries[0]!r} for "
                f"the MTP layer; it must be one of {_WINDOW}, a window alone: {_NO_MODULE}"
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
    if config.model_type in COMPRESSED_MODEL_TYPES:  # their module has a window alone, and a router of its own
        config.layer_types = [*config.layer_types, "sliding_attention"]
        config.mlp_layer_types = [*config.mlp_layer_types, "moe"]
    for name in () if config.model_type in COMPRESSED_MODEL_TYPES else _PER_LAYER:
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
) -> MtpLayer:
    """Load the module of a model whose layers `DecoderBlock` computes, or LongCat's."""
    config = parts.model.config
    eps = config.rms_norm_eps
    attention, layer = load_attention(f"{names.block}.self_attn")
    mlp = parts.dense(names.mlp) if config.model_type == "longcat_flash" else parts.mlp(names.mlp)
    second_norm = read_norm(parts, f"{names.block}.post_attention_layernorm.weight")
    block = DecoderBlock(layer, attention, mlp, second_norm, read_norm(parts, names.output_norm), eps, reduce)
    input_norms = read_norm(parts, names.embedding_norm), read_norm(parts, names.hidden_norm)
    (projection,) = read_projections(parts, names)
    input_norm = read_norm(parts, f"{names.block}.input_layernorm.weight")
    return MtpLayer(embedding, *input_norms, projection, input_norm, block, eps)


def read_norm(parts: Parts, name: str) -> Tensor:
    """Return the weight of one of the module's norms."""
    return read_weight(parts.weights, name, (parts.model.config.hidden_size,)).to(parts.device, parts.dtype)


def read_projections(parts: Parts, names: MtpNames) -> list[Linear]:
    """Load the module's projections, whole."""
    size = parts.model.config.hidden_size
    shape = size, 2 * size // len(names.projections)
    linears = [Linear(shape[1], size, dtype=parts.dtype, device=parts.device) for _ in names.projections]
    for linear, name in zip(linears, names.projections, strict=True):
        linear.load(read_linear(parts.weights, name, shape))
    return linears
