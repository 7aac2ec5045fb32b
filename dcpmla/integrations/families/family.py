"""A model family: what differs between models, with DeepSeek-V3's as the default."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from torch import Tensor

from dcpmla.attention.kind import AttentionKind, DenseKind
from dcpmla.hf_quantization import has_quantized_weights
from dcpmla.integrations.checkpoint_names import TEXT_RULES, rename
from dcpmla.integrations.config_checks import check_mla, check_model, check_raw_config
from dcpmla.integrations.decoder import load_decoder
from dcpmla.integrations.families.mla_config import mla_config
from dcpmla.integrations.families.routing import Routing
from dcpmla.integrations.mtp import NO_MODULE, MtpNames, load_mtp
from dcpmla.integrations.parts import Parts
from dcpmla.integrations.sharded_model import DecoderModule, MtpModule

_PER_LAYER = ("mlp_layer_types", "layer_types")  # lists of a config with an entry a layer


@dataclass(frozen=True)
class Family:
    """A family whose blocks, attention, names and MTP module are DeepSeek-V3's. A subclass overrides what differs.

    Attributes:
        class_prefix: Beginning of the names of transformers' classes.
        routing: Choice of experts.
    """

    class_prefix: str = "DeepseekV3"
    routing: Routing = Routing()

    def read_config(self, raw: dict[str, Any]) -> Any:
        """Return the transformers config of the fields of a config.json, without its model_type, checked.

        Raises:
            ValueError: A field that no such model can have. transformers raises exceptions of other kinds, too.
        """
        check_raw_config(raw)
        if not has_quantized_weights(raw.get("quantization_config") or {}):
            del raw["quantization_config"]
        config = getattr(transformers, f"{self.class_prefix}Config").from_dict(raw)
        check_model(config, self.routing)
        self.check_attention(config)
        return config

    def check_attention(self, config: Any) -> None:
        """Raise ValueError for fields of attention that do not belong together."""
        check_mla(config)

    def attention(self, config: Any, has_mtp: bool = False) -> AttentionKind:
        """Return the kind of attention, with all its layers.

        Args:
            has_mtp: Whether the config is that of `with_mtp_layer`.
        Raises:
            ValueError: A field that no attention can have.
        """
        return DenseKind(mla_config(config), config.num_hidden_layers)

    def module_name(self, name: str, num_layers: int) -> str:
        """Return the name of transformers' module for a tensor of a checkpoint.

        Args:
            num_layers: Number of decoder layers, after which the MTP module is named.
        """
        return rename(name, TEXT_RULES)

    def load_decoder(self, parts: Parts, num_layers: int) -> DecoderModule:
        """Load the decoder, without the MTP module's layer."""
        return load_decoder(parts, num_layers)

    def check_mtp(self, config: Any) -> None:
        """Raise ValueError for a model without an MTP module that this package computes."""
        if not getattr(config, "num_nextn_predict_layers", None):
            raise ValueError(
                f"speculative_method (--speculative-method) is 'mtp', but the model's config has no "
                f"num_nextn_predict_layers: {NO_MODULE}"
            )

    def with_mtp_layer(self, config: Any) -> Any:
        """Return a config with the MTP module's decoder layer after the others."""
        config = copy.deepcopy(config)
        for name in _PER_LAYER:
            if isinstance(getattr(config, name, None), list):
                setattr(config, name, [*getattr(config, name), getattr(config, name)[-1]])
        config.num_hidden_layers += 1
        return config

    def mtp_names(self, config: Any) -> MtpNames:
        """Return the names of the MTP module's weights, for a config without it."""
        block = f"model.layers.{config.num_hidden_layers}"
        norms = f"{block}.enorm.weight", f"{block}.hnorm.weight"
        return MtpNames(block, f"{block}.mlp", *norms, (f"{block}.eh_proj.weight",), f"{block}.shared_head.norm.weight")

    def mtp_shapes(
        self, config: Any, names: MtpNames, of_model: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the MTP module's weights that are in no decoder layer of transformers' model.

        Args:
            of_model: Shapes of the model's weights by their names (`published_shapes`).
        """
        return names.shapes(config.hidden_size)

    def load_mtp(self, parts: Parts, names: MtpNames, embedding: Tensor) -> MtpModule:
        """Load the MTP module.

        Args:
            embedding: Embedding of the model.
        """
        return load_mtp(parts, names, embedding, parts.mlp(names.mlp))
