"""EAGLE3 heads before their weights are read: a directory of their own, beside the model's (`Eagle3Files`)."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dcpmla.attention.mla.latent_spec import LatentSpec
from dcpmla.attention.stack import Stack
from dcpmla.config import DCPConfig
from dcpmla.fields import (
    FLAG,
    OBJECT,
    SIZE,
    check_fields,
    list_of,
    one_of,
    only,
    option_label,
    optional,
    whole,
)
from dcpmla.integrations.checkpoint import Checkpoint
from dcpmla.integrations.config_checks import reason
from dcpmla.integrations.eagle3_attention import ATTENTION, HeadAttention
from dcpmla.integrations.families.table import family_of
from dcpmla.integrations.model_files import find_model
from dcpmla.integrations.skeleton import build_skeleton, published_shapes

LABEL = option_label("speculative_model")
LAYER, EMBEDDING, HEAD = "model.layers.0", "model.embed_tokens.weight", "lm_head.weight"
_NAMES = (
    (re.compile(r"^(model\.)?(midlayer|layers\.0)\."), f"{LAYER}."),
    (re.compile(r"^(model\.)?(fc|fc_norm|norm|embed_tokens)\."), r"model.\2."),
)
# Fields of a dense layer, which the head's layer is, beside its attention's; all others have no meaning for it.
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_FIELDS = (
    *_REQUIRED,
    *("rms_norm_eps", "hidden_act", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
    *("quantization_config", "dtype", "torch_dtype"),
)
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_RULES = {
    **dict.fromkeys(_REQUIRED, SIZE),
    "num_hidden_layers": only(1),
    "eagle_config": optional(OBJECT),
    _LAYER_IDS: optional(list_of(whole(1))),
    **dict.fromkeys(("draft_vocab_size", "target_hidden_size"), optional(SIZE)),
    **dict.fromkeys(("fc_norm", "norm_before_residual", "norm_output"), optional(FLAG)),
    "norm_before_fc": optional(only(False)),  # a norm of all hidden states together, in the heads of other publishers
}


@dataclass(frozen=True)
class Eagle3Files:
    """An EAGLE3 head before its weights are read.

    Attributes:
        config: transformers' config of a model of the kind's family with the head's one layer.
        fields: All fields of the head's config.json.
        digest: Hash of config.json.
        shared: Names in `skeleton` of the tensors that the head takes from the model, because it has none: its
            embedding, its head.
    """

    directory: Path
    config: Any
    fields: Mapping[str, Any]
    digest: str
    shared: frozenset[str]

    def layer_ids(self, num_layers: int) -> list[int]:
        """Return the numbers of the model's layers whose inputs the head takes.

        Published numbers that begin with 1 are of layers whose outputs it takes, one less (SGLang's convention); by
        default they are 2, n // 2 and n - 3.

        Args:
            num_layers: Number n of the model's layers; the input of layer n is the last layer's output.
        Raises:
            ValueError: The model has no such layer.
        """
        found = self.fields.get(_LAYER_IDS) or (self.fields.get("eagle_config") or {}).get(_LAYER_IDS)
        ids = found or [2, num_layers // 2, num_layers - 3]
        ids = [number + 1 for number in ids] if found and ids[0] == 1 else list(ids)
        if not all(1 <= number <= num_layers for number in ids):
            raise ValueError(f"{LABEL}: {_LAYER_IDS} is {found}; the model has {num_layers} layers")
        return ids

    @property
    def kind(self) -> HeadAttention:
        """Return what the layer's kind of attention determines."""
        return ATTENTION[self.fields["architectures"][0]]

    @property
    def draft_vocab_size(self) -> int:
        """Return the size of the draft's vocabulary."""
        return self.fields.get("draft_vocab_size") or int(self.config.vocab_size)

    def attention(self, of_model: Stack) -> Stack:
        """Return the attention of a model and of the head, whose layer is the last."""
        return replace(of_model, layers=(*of_model.layers, self.kind.spec(self.config)))

    def check(self, config: Any, dcp: DCPConfig) -> None:
        """Raise ValueError unless the head fits a model and a layout."""
        width = self.fields.get("target_hidden_size") or self.config.hidden_size
        for name, own, of_model in (
            ("vocab_size", self.config.vocab_size, config.vocab_size),
            ("target_hidden_size, by default hidden_size,", width, config.hidden_size),
            *([("hidden_size", self.config.hidden_size, config.hidden_size)] if self.shared else []),
        ):
            if own != of_model:
                raise ValueError(f"{LABEL}: {name} is {own}; the model's is {of_model}")
        attention = family_of(config).attention(config)
        if LatentSpec not in map(type, attention.layers):
            raise ValueError(
                f"{LABEL}: {config.model_type} has no layers of plain MLA, whose cache a head needs; leave it out"
            )
        self.layer_ids(config.num_hidden_layers)
        try:
            self.attention(attention).check_layout(dcp)
        except ValueError as error:
            raise ValueError(f"{LABEL}: {error}") from error

    def checkpoint(self) -> Checkpoint:
        """Return the head's tensors by the names of `skeleton`."""
        return Checkpoint(self.directory, getattr(self.config, "quantization_config", None), _module_name)

    def shapes(self, skeleton: Any) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the head's own tensors."""
        return {name: shape for name, shape in published_shapes(skeleton).items() if name not in self.shared}

    def skeleton(self, num_parts: int) -> Any:
        """Return transformers' model of the config with the head's shapes, without memory.

        Args:
            num_parts: Number of the model's hidden states that the head takes.
        """
        model, config = build_skeleton(self.config, self.kind.family), self.config
        size, width = config.hidden_size, self.fields.get("target_hidden_size") or config.hidden_size
        with torch.device("meta"):
            layer = model.model.layers[0]
            for name in self.kind.widened:
                if (linear := getattr(layer.self_attn, name, None)) is not None:
                    setattr(layer.self_attn, name, nn.Linear(2 * size, linear.out_features, linear.bias is not None))
            layer.hidden_norm = nn.RMSNorm(size)
            model.model.fc = nn.Linear(num_parts * width, size, bias=False)
            if self.fields.get("fc_norm"):
                model.model.fc_norm = nn.ModuleList(nn.RMSNorm(width) for _ in range(num_parts))
            model.lm_head = nn.Linear(size, self.draft_vocab_size, bias=False)
            if self.draft_vocab_size != config.vocab_size:
                model.register_buffer("d2t", torch.empty(self.draft_vocab_size, dtype=torch.int64))
        return model


def open_eagle3(model: str) -> Eagle3Files:
    """Find a head, and read its config.

    Args:
        model: Directory or hub id.
    Raises:
        ValueError: There is no such head, or its config is of another architecture or has impossible fields.
    """
    try:
        directory = find_model(model)
    except ValueError as error:
        raise ValueError(f"{LABEL}: {error}") from error
    file = directory / "config.json"
    try:
        content = file.read_bytes()
        fields = json.loads(content)
        check_fields({"config.json": OBJECT}, {"config.json": fields})
        names = list_of(one_of([*ATTENTION]), length=1)
        check_fields({"architectures": names}, {"architectures": fields.get("architectures")})
        kind = ATTENTION[fields["architectures"][0]]
        required = dict.fromkeys((*_REQUIRED, *kind.required))
        check_fields({**_RULES, **kind.rules}, {**required, **fields, **(fields.get("eagle_config") or {})})
        raw = {name: fields[name] for name in (*_FIELDS, *kind.required, *kind.fields) if name in fields}
        raw |= {"tie_word_embeddings": False, "num_hidden_layers": 1, **kind.fixed}
        config = kind.family.read_config({"num_key_value_heads": raw["num_attention_heads"], **raw})
    except Exception as error:  # transformers checks fields with exceptions of many kinds
        raise ValueError(f"{LABEL} is {model!r}: {file} is of no head: {reason(error)}") from error
    files = Eagle3Files(directory, config, fields, sha256(content).hexdigest()[:12], frozenset())
    if not any(directory.glob("*.safetensors*")):  # a plan needs no weights
        return files
    own = {EMBEDDING} if files.draft_vocab_size != config.vocab_size else {EMBEDDING, HEAD}
    return replace(files, shared=frozenset(own - files.checkpoint().names))


def _module_name(name: str) -> str:
    """Return the name in `Eagle3Files.skeleton` of a tensor of a checkpoint."""
    for pattern, called in _NAMES:
        name = pattern.sub(called, name)
    return name
