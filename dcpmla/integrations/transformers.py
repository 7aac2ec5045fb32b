"""From a transformers config and a checkpoint to a sharded model (launch/tested_versions.txt: versions that passed).

transformers provides configs, shapes and rotary embeddings (skeleton.py); modules with matrices are this package's, and
read their own slices of the checkpoint (parts.py). Differences between families are in `families`. Tokens are flat [T].
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from dcpmla.attention.placement import Placement
from dcpmla.comm.reduce import select_reduce
from dcpmla.comm.select import ChosenExchange
from dcpmla.config import DCPConfig
from dcpmla.integrations.checkpoint import Checkpoint
from dcpmla.integrations.config_checks import check_generation_config
from dcpmla.integrations.dummy import dummy_weights
from dcpmla.integrations.eagle3 import Eagle3Files
from dcpmla.integrations.eagle3_loading import load_eagle3
from dcpmla.integrations.families.table import family_of
from dcpmla.integrations.model_size import warn_of_cuts
from dcpmla.integrations.parts import Parts
from dcpmla.integrations.sharded_model import ShardedModel
from dcpmla.integrations.skeleton import build_skeleton, check_shapes, part_of, published_shapes
from dcpmla.model.deterministic import make_deterministic
from dcpmla.parallel.linear import Weight
from dcpmla.parallel.mesh import DCPMesh


def _in_range(dtype: torch.dtype) -> torch.dtype:
    """Return a checkpoint's dtype, but bfloat16 for float16: sums of many models exceed its range, 65,504."""
    return torch.bfloat16 if dtype == torch.float16 else dtype


def load_model(
    directory: Path,
    config: Any,
    dcp: DCPConfig,
    mesh: DCPMesh,
    selection: ChosenExchange,
    dtype: torch.dtype | None,
    device: torch.device,
    enable_expert_parallel: bool = False,
    load_format: str = "auto",
    expert_dtype: str = "auto",
    with_mtp: bool = False,
    eagle3: Eagle3Files | None = None,
) -> ShardedModel:
    """Load a checkpoint, every rank its own part. Collective over the job, whose ranks must be the TP group.

    Args:
        config: Config from `load_config`.
        dtype: Dtype of computation; None takes the checkpoint's, but bfloat16 for float16.
        enable_expert_parallel: Whether each rank holds its share of the experts whole, not a slice of every one.
        load_format: Source of weights: "auto" reads the checkpoint, "dummy" needs none and draws random ones.
        expert_dtype: Format of experts: "auto" leaves them as stored, "fp8" re-encodes 4-bit ones without rounding.
        with_mtp: Whether to load the checkpoint's own module that drafts, too (`Family.check_mtp`, `check_dspark`).
        eagle3: EAGLE3 head to load, too, which fits the model; None without.
    Raises:
        ValueError: Sizes do not divide, tensors are missing or have another shape, or the generation config is broken.
    """
    check_generation_config(directory)
    family, num_layers = family_of(config), config.num_hidden_layers
    mtp_block = f"model.layers.{num_layers}"
    if with_mtp:
        config = family.with_mtp_layer(config)
    attention = family.attention(config, with_mtp)
    attention = attention if eagle3 is None else eagle3.attention(attention)
    attention.check_layout(dcp)
    model = build_skeleton(config)
    shapes = published_shapes(model)
    mtp_shapes = family.mtp_shapes(config, mtp_block, shapes) if with_mtp else {}
    shapes |= mtp_shapes
    weights: Mapping[str, Weight]
    if load_format == "dummy":
        dtype = dtype or _in_range(config.dtype or torch.bfloat16)
        weights = dummy_weights(shapes, model.config, dtype, device)
    else:
        used, rename = {part_of(name) for name in shapes}, partial(family.module_name, num_layers=num_layers)
        quantization = getattr(model.config, "quantization_config", None)
        checkpoint = Checkpoint(directory, quantization, rename, lambda name: part_of(name) in used)
        check_shapes(model, checkpoint, family.routing, mtp_shapes)
        dtype, weights = dtype or _in_range(config.dtype or checkpoint.dtype), checkpoint.weights("")
    if enable_expert_parallel and not any(hasattr(module, "experts") for module in model.modules()):
        raise ValueError(
            "enable_expert_parallel (--enable-expert-parallel): the model has no experts; leave the option out"
        )
    placement = Placement(dcp, mesh, selection.exchange, dtype, device)
    reduce = select_reduce(mesh.tp_group, device, dcp.exchange_timeout, dcp.deterministic)
    formats = enable_expert_parallel and mesh.tp_size > 1, expert_dtype
    glus, eps = partial(family.glus, config), config.rms_norm_eps
    parts = Parts(model, weights, shapes, placement, *formats, family.routing, glus, attention, reduce, eps, directory)
    decoder = family.load_decoder(parts, len(model.model.layers) - config.num_hidden_layers + num_layers)
    own_layers = range(parts.num_layers, attention.num_layers)
    loaded = ShardedModel(
        decoder,
        parts.head(),
        rotary.to(device) if (rotary := getattr(model.model, "rotary_emb", None)) is not None else None,
        attention,
        placement,
        reduce,
        _eos_token_ids(directory, config),
    )
    if with_mtp:
        prepare = partial(attention.prepare, rotary=loaded.angles, dtype=dtype, layers=own_layers)
        loaded.drafts = family.load_drafts(parts, mtp_block, decoder, loaded.head, prepare)
    warn_of_cuts(model, placement, formats[0])
    if eagle3 is not None:
        loaded.drafts = load_eagle3(eagle3, loaded, reduce, load_format, parts.default_scales)
    parts.warn_of_missing_scales()
    if dcp.deterministic:
        for module in loaded.modules():
            make_deterministic(module)
    return loaded


def _eos_token_ids(directory: Path, config: Any) -> frozenset[int]:
    """Return the end-of-sequence tokens of the generation config, else of the model's config."""
    eos = None
    if (directory / "generation_config.json").is_file():
        eos = transformers.GenerationConfig.from_pretrained(str(directory)).eos_token_id
    eos = config.eos_token_id if eos is None else eos
    return frozenset([eos] if isinstance(eos, int) else eos or [])
