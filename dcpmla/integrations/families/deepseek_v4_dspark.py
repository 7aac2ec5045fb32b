"""DSpark modules in the tensors of a DeepSeek-V4 or V4.1 checkpoint (`mtp.*`): their config, shapes and loading."""

import copy
import re
from dataclasses import dataclass, replace
from typing import Any

from dcpmla.attention.layers.compressed.config import CompressedConfig, LayerKind
from dcpmla.fields import check_fields, list_of, option_label, optional, whole
from dcpmla.integrations.draft_model import Prepare, TrainedDrafts
from dcpmla.integrations.dspark_model import DSparkModel
from dcpmla.integrations.families.family import Family
from dcpmla.integrations.families.streams import load_connection, load_stream_block, mixing_constants
from dcpmla.integrations.parts import Parts, Shapes
from dcpmla.integrations.sharded_model import DecoderModule
from dcpmla.model.block import VocabHead
from dcpmla.model.dspark import DSpark, MarkovHead
from dcpmla.model.stream_decoder import StreamDecoder, StreamTap
from dcpmla.model.streams import Connection, DelayedCollapse

_NEEDED = {
    "dspark_markov_rank": whole(1, 1 << 16),
    "dspark_noise_token_id": whole(0),
    "dspark_target_layer_ids": list_of(whole(0, 1023)),
}
_EXPERTS = {"dspark_n_routed_experts": "n_routed_experts", "dspark_num_experts_per_tok": "num_experts_per_tok"}
DSPARK_RULES = {"dspark_block_size": optional(whole(0, 64)), **dict.fromkeys(_EXPERTS, optional(whole(1, 1 << 16)))}
DSPARK_NAMES = (  # published names of tensors
    (r"^layers\.(\d+)\.norm\.", r"layers.\1.shared_head.norm."),
    (r"\.markov_head\.embed\.", ".markov_head.markov_w1."),  # V4.1
    (r"\.markov_head\.head\.", ".markov_head.markov_w2."),
)
_METHOD, _NUM_DRAFTS = option_label("speculative_method"), option_label("num_speculative_tokens")
WINDOWS = (0, "sliding_attention")  # entries of compress_ratios and of layer_types
_NUM_BLOCKS = 3  # where the config does not say it


@dataclass(frozen=True)
class DSparkFamily(Family):
    """A family of models over several streams whose checkpoints may have a DSpark module in place of an MTP module.

    Attributes:
        delays: Whether hyper-connections are delayed, and the module takes the inputs of the model's layers (V4.1);
            else it takes their outputs.
    """

    delays: bool = False

    def check_mtp(self, config: Any) -> None:
        """Raise ValueError for a model without an MTP module that this package computes."""
        if _has_dspark(config):
            raise ValueError(
                f"{_METHOD} is 'mtp', but the config's module is DSpark (dspark_block_size "
                f"{config.dspark_block_size}): take dspark"
            )
        super().check_mtp(config)

    def check_dspark(self, config: Any, num_drafts: int) -> None:
        """Raise ValueError for a model without a DSpark module, or with one of fewer drafts or impossible fields."""
        if not _has_dspark(config):
            super().check_dspark(config, num_drafts)
        check_fields(_NEEDED, {name: getattr(config, name, None) for name in _NEEDED})
        ids, noise = config.dspark_target_layer_ids, config.dspark_noise_token_id
        if num_drafts > config.dspark_block_size:
            raise ValueError(
                f"{_NUM_DRAFTS} is {num_drafts}; it must be at most the config's dspark_block_size "
                f"{config.dspark_block_size}"
            )
        if not ids or ids != sorted({*ids}) or ids[-1] >= config.num_hidden_layers:
            raise ValueError(
                f"dspark_target_layer_ids is {ids}; it must be ascending layers of num_hidden_layers "
                f"{config.num_hidden_layers}, at least one"
            )
        ratios = getattr(config, "module_ratios", [])
        if not {*ratios} <= {*WINDOWS}:
            raise ValueError(
                f"compress_ratios or layer_types of the config end in {ratios} for the DSpark module; each must be one "
                f"of {WINDOWS}, a window alone"
            )
        if noise >= config.vocab_size:
            raise ValueError(f"dspark_noise_token_id is {noise}; it must be below vocab_size {config.vocab_size}")
        self.routing.check(_own_config(config))

    def with_mtp_layer(self, config: Any) -> Any:
        """Return a config with the module's decoder layers after the others, `num_main_layers`."""
        num_layers, extended = config.num_hidden_layers, super().with_mtp_layer(config)
        for _ in range(_num_blocks(config) - 1 if _has_dspark(config) else 0):
            extended = super().with_mtp_layer(extended)
        extended.num_main_layers = num_layers
        return extended

    def with_block(self, geometry: CompressedConfig, config: Any) -> CompressedConfig:
        """Return the geometry of attention with the module's layers, those after the main ones in the config."""
        num_main = _num_main(config)
        if num_main is None:
            return geometry
        block = LayerKind(0, False, block=config.dspark_block_size)
        kinds = *geometry.layer_kinds[:num_main], *[block] * (config.num_hidden_layers - num_main)
        return replace(geometry, layer_kinds=kinds)

    def extend(self, model: Any) -> None:
        """Give the module's layers as many experts as its own fields say."""
        num_main = _num_main(model.config)
        if num_main is None:
            return
        for number, layer in enumerate(model.model.layers[num_main:], num_main):
            layer.mlp = type(layer.mlp)(_own_config(model.config), number)

    def module_name(self, name: str, num_layers: int) -> str:
        """Return the name of transformers' module for a tensor of a checkpoint."""
        return super().module_name(
            re.sub(r"^mtp\.(\d+)\.", lambda found: f"layers.{num_layers + int(found[1])}.", name), num_layers
        )

    def mtp_shapes(self, config: Any, block: str, of_model: Shapes) -> Shapes:
        """Return the shapes of the module's weights that are in no decoder layer of transformers' model."""
        size, num, last = config.hidden_size, config.hc_mult, block
        shapes: Shapes = {}
        if _has_dspark(config):
            last, rank = _last_block(config), config.dspark_markov_rank
            shapes |= {f"{block}.main_proj.weight": (size, len(config.dspark_target_layer_ids) * size)}
            shapes |= {f"{block}.main_norm.weight": (size,), f"{last}.shared_head.norm.weight": (size,)}
            shapes |= {f"{last}.markov_head.markov_w{part}.weight": (config.vocab_size, rank) for part in (1, 2)}
        else:
            shapes |= super().mtp_shapes(config, block, of_model)
        if self.delays:
            return shapes
        collapse = {"fn": (num, num * size), "base": (num,), "scale": (1,)}
        return shapes | {f"{last}.hc_head_{part}": shape for part, shape in collapse.items()}

    def load_drafts(
        self, parts: Parts, block: str, decoder: DecoderModule, head: VocabHead, prepare: Prepare
    ) -> TrainedDrafts:
        """Load the module over a decoder, which it takes its context from."""
        config = parts.model.config
        if not _has_dspark(config):
            return super().load_drafts(parts, block, decoder, head, prepare)
        assert isinstance(decoder, StreamDecoder)
        module = self._load_dspark(parts, block, decoder, head)
        first = 0 if self.delays else 1  # the output of a layer is the input of the next
        decoder.tap = StreamTap(tuple(first + number for number in config.dspark_target_layer_ids), module.inject)
        return DSparkModel(module, prepare)

    def _load_dspark(self, parts: Parts, block: str, decoder: StreamDecoder, head: VocabHead) -> DSpark:
        config, last, device = parts.model.config, _last_block(parts.model.config), parts.placement.device
        model = copy.copy(parts.model)  # the same modules, with the config that routes to the module's experts
        model.config = _own_config(config)
        own, norm = replace(parts, model=model), f"{last}.shared_head.norm.weight"
        constants = mixing_constants(config, self.delays)
        numbers = range(config.num_main_layers, config.num_hidden_layers)
        blocks = [load_stream_block(own, f"model.layers.{number}", constants) for number in numbers]
        to_head: Connection | DelayedCollapse
        if self.delays:
            to_head = DelayedCollapse(parts.values(norm), config.rms_norm_eps).to(device)
        else:
            to_head = load_connection(parts, f"{last}.hc_head_", norm, constants)
        layers = StreamDecoder(decoder.embedding, blocks, config.hc_mult, to_head, collapses=True)
        markov = f"{last}.markov_head.markov_w"
        transition = parts.linear(f"{markov}2.weight", parts.vocab_rows(config.vocab_size))
        return DSpark(
            parts.linear(f"{block}.main_proj.weight"),
            parts.vector(f"{block}.main_norm.weight"),
            layers,
            MarkovHead(head, parts.vector(f"{markov}1.weight"), transition),
            config.dspark_noise_token_id,
            config.dspark_block_size,
            config.rms_norm_eps,
        )


def _has_dspark(config: Any) -> bool:
    return bool(getattr(config, "dspark_block_size", None))


def _num_main(config: Any) -> int | None:
    """Return the number of the model's own layers in a config with a DSpark module's; None without these."""
    return getattr(config, "num_main_layers", None) if _has_dspark(config) else None


def _num_blocks(config: Any) -> int:
    """Return the number of the module's layers: the entries of the config's compress_ratios after the model's."""
    return len(getattr(config, "module_ratios", ())) or _NUM_BLOCKS


def _last_block(config: Any) -> str:
    """Return the name of the module's last layer, in a config that has it."""
    return f"model.layers.{config.num_hidden_layers - 1}"


def _own_config(config: Any) -> Any:
    """Return a config with the experts of the module's layers, by default the model's."""
    own = copy.copy(config)
    for name, called in _EXPERTS.items():
        setattr(own, called, getattr(config, name, None) or getattr(config, called))
    return own
