"""The differences between model families, with DeepSeek-V3's values as the defaults."""

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import transformers
from torch import Tensor, nn

from dcpmla.attention.mla.latent_spec import LatentSpec
from dcpmla.attention.spec import LayerSpec
from dcpmla.attention.stack import Stack
from dcpmla.config import MLAConfig
from dcpmla.fields import Rule
from dcpmla.hf_quantization import has_quantized_weights
from dcpmla.integrations.config_checks import check_mla, check_model, check_raw_config
from dcpmla.integrations.draft_model import DraftModel, DraftModule, Prepare, TrainedDrafts
from dcpmla.integrations.families.routing import Routing
from dcpmla.integrations.parts import Parts, Shapes, load_decoder, load_mtp
from dcpmla.integrations.sharded_model import DecoderModule
from dcpmla.model.block import VocabHead
from dcpmla.model.glu import Glu, LayerGlus

# eps of the norms of both latents. Whatever a config's rms_norm_eps is (it holds for the other norms), the modeling
# code published with DeepSeek-V2, V3 and V3.2, Kimi-K2 and LongCat, and transformers' for all families, leave these
# two at their class's default.
_LATENT_NORM_EPS = 1e-6
NO_MTP = "leave --speculative-method mtp out, or take ngram"  # end of messages about a missing module
NameRules = tuple[tuple[str, str], ...]  # patterns, and what replaces them, in the order in which they apply
_TEXT_NAMES = (  # of all families
    # a multimodal model around the text model
    (r"^language_model\.(?=model\.|lm_head\.)", ""),
    (r"^model\.language_model\.", "model."),
    # packed codes of compressed-tensors, AWQ and GPTQ, and what the latter have beside them
    (r"\.(weight_packed|qweight)$", ".weight"),
    (r"\.scales$", ".weight_scale"),
    (r"\.qzeros$", ".weight_zero_point"),
    (r"\.([kq])_proj\.output_scale$", r".\1_scale"),  # a calibrated cache's, and its queries'
    (r"(?<!\.mlp)\.post_mlp_layernorm\.", ".mlp.post_mlp_layernorm."),  # A.X-K1
)
_PER_LAYER = ("mlp_layer_types", "layer_types")  # lists of a config with an entry a layer


class _TextModel(nn.Module):
    """transformers' text model and a head, by the names of the multimodal model, where no other model has a head.

    Args:
        config: Config of the text model.
        model: transformers' text model.
    """

    def __init__(self, config: Any, model: Any) -> None:
        super().__init__()
        self.config, self.model = config, model
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._keep_in_fp32_modules = model._keep_in_fp32_modules
        self._keep_in_fp32_modules_strict = model._keep_in_fp32_modules_strict


@dataclass(frozen=True)
class Family:
    """A family whose blocks, attention, names and MTP module are DeepSeek-V3's. A subclass overrides what differs.

    Attributes:
        class_prefix: Beginning of the names of transformers' classes.
        routing: Choice of experts.
        check_attention: Function that raises ValueError for inconsistent fields of a config.
        load_decoder: Loader of a number of the model's layers, without the MTP module's.
        load_mtp: Loader of the MTP module, whose block has a name, over the model's embedding.
        rules: Rules for the family's own fields of a config.json, and for fields with a single value in this family, by
            name; a field of an object has the name "object.field".
        mtp_layer: Entries of the MTP module's layer in the config's lists; a list without one repeats its last entry.
        mtp_projections: Names of the MTP module's projection of embeddings and hidden states together, or of one of
            each.
        names: Rules for names of tensors, after the rules of all families; names of modules stay. "{mtp}" is the number
            of the MTP module's layer.
        no_mtp: Reason why no MTP module is computed, which follows "speculative_method is 'mtp'"; empty if one is.
    """

    class_prefix: str = "DeepseekV3"
    routing: Routing = Routing()
    check_attention: Callable[[Any], None] = check_mla
    load_decoder: Callable[[Parts, int], DecoderModule] = load_decoder
    load_mtp: Callable[[Parts, str, Tensor], DraftModule] = load_mtp
    rules: Mapping[str, Rule] = field(default_factory=dict)
    mtp_layer: Mapping[str, str] = field(default_factory=dict)
    mtp_projections: tuple[str, ...] = ("eh_proj",)
    names: NameRules = ()
    no_mtp: str = ""

    def config_class(self) -> Any:
        """Return transformers' class of configs.

        Raises:
            ValueError: The installed transformers has none.
        """
        config_class = getattr(transformers, f"{self.class_prefix}Config", None)
        if config_class is None:
            raise ValueError(
                f"model: transformers {transformers.__version__} has no {self.class_prefix}Config; install a later one"
            )
        return config_class

    def read_config(self, raw: dict[str, Any]) -> Any:
        """Return the transformers config of the fields of a config.json, without its model_type, checked.

        Raises:
            ValueError: A field that no such model can have. transformers raises exceptions of other kinds, too.
        """
        self.check_raw(raw)
        if not has_quantized_weights(raw.get("quantization_config") or {}):
            del raw["quantization_config"]
        config = self.config_class().from_dict(self.translate(raw))
        self.check(config)
        self.complete(config, raw)
        return config

    def check_raw(self, raw: dict[str, Any]) -> None:
        """Raise ValueError for a field of a config.json that no such model can have."""
        check_raw_config(raw, self.config_class().attribute_map, {**self.routing.rules(), **self.rules})

    def translate(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a config.json, which keep to the rules, as transformers' class takes them."""
        return raw

    def complete(self, config: Any, raw: Mapping[str, Any]) -> None:
        """Add fields of a config.json to its transformers config, which lacks them."""

    def check(self, config: Any) -> None:
        """Raise ValueError for a transformers config that no such model can have."""
        check_model(config, self.routing)
        self.check_attention(config)

    def attention(self, config: Any, has_mtp: bool = False) -> Stack:
        """Return the attention of all layers.

        Args:
            has_mtp: Whether the config comes from `with_mtp_layer`.
        Raises:
            ValueError: A field that no attention can have.
        """
        mla = self.mla(config)
        return Stack(mla, tuple(self.layers(config, mla, has_mtp)))

    def layers(self, config: Any, mla: MLAConfig, has_mtp: bool) -> Iterable[LayerSpec]:
        """Return the specs of all layers, from the geometry of layers of MLA."""
        return (LatentSpec(mla),) * config.num_hidden_layers

    def mla(self, config: Any) -> MLAConfig:
        """Return the geometry of layers of MLA as DeepSeek-V3 reads its fields.

        Raises:
            ValueError: A field that no attention can have.
        Source: the attention classes of transformers; YaRN's mscale from the DeepSeek-V2 paper.
        """
        rope = getattr(config, "rope_parameters", None) or {}
        scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
        if rope.get("rope_type", "default") != "default" and rope.get("mscale_all_dim"):
            scale *= yarn_mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
        return MLAConfig(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            q_lora_rank=getattr(config, "q_lora_rank", None),  # Mistral Large 4 has no such field
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            softmax_scale=scale,
            rms_norm_eps=_LATENT_NORM_EPS,
            rope_interleaved=getattr(config, "rope_interleave", True),
            attention_bias=config.attention_bias,
        )

    def glus(self, config: Any, layer: int) -> LayerGlus:
        """Return a layer's gated linear units: swiglu_limit bounds all."""
        limit = getattr(config, "swiglu_limit", None)
        return LayerGlus(*3 * [Glu(limit, limit)])

    def new_model(self, config: Any) -> Any:
        """Return transformers' causal language model of a config, or its text model with a head."""
        name = type(config).__name__.removesuffix("Config")
        whole = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM", None)
        return _TextModel(config, getattr(transformers, f"{name}Model")(config)) if whole is None else whole(config)

    def extend(self, model: Any) -> None:
        """Add what the family's models have beyond transformers' model, which has no weights."""

    def module_name(self, name: str, num_layers: int) -> str:
        """Return the name of transformers' module for a tensor of a checkpoint.

        Args:
            num_layers: Number of the model's layers, and so the number in the MTP module's names.
        """
        for pattern, called in _compiled((*_TEXT_NAMES, *self.names), num_layers):
            name = pattern.sub(called, name)
        return name

    def check_mtp(self, config: Any) -> None:
        """Raise ValueError for a model without an MTP module that this package computes."""
        if self.no_mtp:
            raise ValueError(f"speculative_method (--speculative-method) is 'mtp'{self.no_mtp}: {NO_MTP}")
        num_modules, name = getattr(config, "num_nextn_predict_layers", None), "num_nextn_predict_layers"
        if num_modules != 1:
            modules = f"{name} {num_modules!r}, and one module is computed" if num_modules else f"no {name}"
            raise ValueError(
                f"speculative_method (--speculative-method) is 'mtp', but the model's config has {modules}: {NO_MTP}"
            )

    def check_dspark(self, config: Any, num_drafts: int) -> None:
        """Raise ValueError for a model without a DSpark module of num_drafts drafts that this package computes."""
        raise ValueError(
            f"speculative_method (--speculative-method) is 'dspark', but {config.model_type} has no DSpark module that "
            "is computed (dspark_block_size in the config of DeepSeek-V4 and V4.1): leave it out, or take ngram"
        )

    def with_mtp_layer(self, config: Any) -> Any:
        """Return a config with the MTP module's decoder layer after the others, `num_main_layers`."""
        config = copy.deepcopy(config)
        config.num_main_layers = config.num_hidden_layers
        for name in {*_PER_LAYER, *self.mtp_layer}:
            if isinstance(entries := getattr(config, name, None), list):
                own = entries[: config.num_main_layers]
                setattr(config, name, [*own, self.mtp_layer.get(name, own[-1])])
        config.num_hidden_layers += 1
        return config

    def load_drafts(
        self, parts: Parts, block: str, decoder: DecoderModule, head: VocabHead, prepare: Prepare
    ) -> TrainedDrafts:
        """Load the checkpoint's own module over a decoder.

        Args:
            block: Name of the module's first block, a layer after the model's.
            head: Head of the model.
            prepare: Function that returns a step with what the module's layers need.
        """
        return DraftModel(self.load_mtp(parts, block, decoder.embedding), [decoder], head, prepare)

    def mtp_shapes(self, config: Any, block: str, of_model: Shapes) -> Shapes:
        """Return the shapes of the MTP module's weights that are in no decoder layer of transformers' model.

        Args:
            block: Name of the module's block, a layer after the model's.
            of_model: Shapes of the model's weights by their names (`published_shapes`).
        """
        size, projections = config.hidden_size, self.mtp_projections
        norms = (f"{block}.{name}.weight" for name in ("enorm", "hnorm", "shared_head.norm"))
        shape = size, 2 * size // len(projections)
        return dict.fromkeys(norms, (size,)) | {f"{block}.{name}.weight": shape for name in projections}


@cache
def _compiled(rules: NameRules, num_layers: int) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern), called.replace("{mtp}", str(num_layers))) for pattern, called in rules]


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention temperature for a context stretched by `factor`: 0.1 mscale ln(factor) + 1.

    Source: YaRN, section 3.4.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
