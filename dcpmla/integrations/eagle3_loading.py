"""EAGLE3 heads as they are loaded, every rank its own part (`load_eagle3`)."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from dcpmla.comm.reduce import Reduce
from dcpmla.integrations.draft_model import DraftModel
from dcpmla.integrations.dummy import dummy_weights
from dcpmla.integrations.eagle3 import EMBEDDING, HEAD, LABEL, LAYER, Eagle3Files
from dcpmla.integrations.parts import Parts, load_block
from dcpmla.integrations.sharded_model import ShardedModel, cos_sin
from dcpmla.model.block import Decoder
from dcpmla.model.eagle3 import Eagle3Head, Eagle3Layer
from dcpmla.parallel.linear import Weight

_OFFSETS = "d2t"


def load_eagle3(
    files: Eagle3Files, model: ShardedModel, reduce: Reduce, load_format: str, default_scales: set[str]
) -> DraftModel:
    """Load a head over a model whose attention has the head's layer. Collective over the job.

    Args:
        reduce: Sums over the TP ranks.
        load_format: Source of weights (`load_model`).
        default_scales: Names of missing scales (`Parts`), to which the head's are added.
    Raises:
        ValueError: Tensors are missing or have another shape, or the model keeps no residual between its layers.
    """
    decoder = model.hidden_states
    if not isinstance(decoder, Decoder):
        raise ValueError(f"{LABEL}: this model's layers have several residuals; a head takes models with one")
    layer_ids = files.layer_ids(len(decoder.blocks))
    skeleton, config, placement = files.skeleton(len(layer_ids)), files.config, model.placement
    shapes = files.shapes(skeleton)
    try:
        if load_format == "dummy":
            weights: Mapping[str, Weight] = dummy_weights(shapes, config, model.dtype, model.device)
        else:
            weights = _weights(files, shapes)
        family = files.kind.family
        parts = Parts(
            *(skeleton, weights, shapes, placement, False, "auto", family.routing, partial(family.glus, config)),
            *(model.attention, reduce),
            config.rms_norm_eps,
            files.directory,
            default_scales,
            num_layers=model.attention.num_layers - 1,
        )
        layer = _load_layer(parts, files, model)
    except ValueError as error:
        raise ValueError(f"{LABEL}: {error}") from error
    last = model.attention.num_layers - 1
    num_pairs = model.attention.layers[last].config.rope_dim // 2
    angles = partial(cos_sin, skeleton.model.rotary_emb.to(model.device), num_pairs, placement)
    prepare = partial(model.attention.prepare, rotary=angles, dtype=model.dtype, layers=(last,))
    return DraftModel(layer, [decoder.blocks[number - 1] for number in layer_ids], layer.head, prepare)


def _weights(files: Eagle3Files, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Weight]:
    """Return the weights of a head's directory by their names, their shapes checked."""
    checkpoint = files.checkpoint()
    checkpoint.check_shapes(shapes)
    # The attention layer checks its own weights.
    missing = {name for name in shapes.keys() - checkpoint.names if ".self_attn." not in name}
    if missing:
        raise ValueError(f"checkpoint: tensor {min(missing)} is missing")
    return checkpoint.weights("")


def _load_layer(parts: Parts, files: Eagle3Files, model: ShardedModel) -> Eagle3Layer:
    fields, names = files.fields, parts.shapes
    embedding = model.hidden_states.embedding if EMBEDDING in files.shared else parts.vector(EMBEDDING)
    head = Eagle3Head(model.head if HEAD in files.shared else parts.head(), _offsets(parts, files))
    block = load_block(parts, LAYER, parts.norm("model.norm"))
    norms = parts.norm(f"{LAYER}.input_layernorm"), parts.norm(f"{LAYER}.hidden_norm")
    part_norms = [parts.vector(name) for name in names if name.startswith("model.fc_norm.")]
    flags = bool(fields.get("norm_before_residual")), bool(fields.get("norm_output"))
    return Eagle3Layer(embedding, parts.linear("model.fc.weight"), part_norms, norms, block, head, *flags)


def _offsets(parts: Parts, files: Eagle3Files) -> Tensor | None:
    """Return the offsets from a draft's number to the model's token; None if the vocabularies are equal.

    Raises:
        ValueError: A token is outside the model's vocabulary.
    """
    if _OFFSETS not in parts.shapes:
        return None
    offsets = parts.weights[_OFFSETS][:].to(parts.placement.device, torch.int64)
    tokens = offsets + torch.arange(len(offsets), device=offsets.device)
    if tokens.min() < 0 or tokens.max() >= files.config.vocab_size:
        raise ValueError(
            f"checkpoint: {_OFFSETS} has token {int(tokens.max())}; the vocabulary has {files.config.vocab_size}"
        )
    return offsets
