"""The table of model families, by the model types of Hugging Face."""

from dataclasses import dataclass, replace
from typing import Any

from dcpmla.attention.stack import Stack
from dcpmla.config import MLAConfig
from dcpmla.fields import choices
from dcpmla.integrations.families.axk2 import AXK2
from dcpmla.integrations.families.deepseek_v4 import DEEPSEEK_V4
from dcpmla.integrations.families.deepseek_v41 import DEEPSEEK_V41
from dcpmla.integrations.families.dots3 import DOTS3
from dcpmla.integrations.families.family import Family
from dcpmla.integrations.families.glm5_next import GLM5_NEXT
from dcpmla.integrations.families.hy_v4 import HY_V4, HY_V4_VL
from dcpmla.integrations.families.hybrid import LING
from dcpmla.integrations.families.kimi import KIMI_LINEAR
from dcpmla.integrations.families.longcat import LONGCAT
from dcpmla.integrations.families.minicpm3 import MINICPM3
from dcpmla.integrations.families.mistral_large4 import MISTRAL_LARGE4
from dcpmla.integrations.families.routing import Routing
from dcpmla.integrations.families.sparse import SparseFamily


@dataclass(frozen=True)
class _Mistral4(Family):
    """Mistral 4, whose queries grow with their positions."""

    def mla(self, config: Any) -> MLAConfig:
        """Return the geometry with the factors of queries."""
        mla, rope = super().mla(config), config.rope_parameters or {}
        if not rope.get("llama_4_scaling_beta"):
            return mla
        scaling = float(rope["llama_4_scaling_beta"]), int(rope["original_max_position_embeddings"])
        return replace(mla, llama_4_scaling=scaling)


@dataclass(frozen=True)
class _Sarvam(Family):
    """Sarvam, whose checkpoints are DeepSeek-V3's with a config of other names."""

    def read_config(self, raw: dict[str, Any]) -> Any:
        """Return DeepSeek-V3's config of the fields."""
        rope = raw.get("rope_scaling")
        if isinstance(rope, dict) and rope.get("type") == "deepseek_yarn":
            raw = raw | {"rope_scaling": rope | {"type": "yarn"}}
        self.check_raw(raw)
        translated = self.config_class().from_dict(raw).to_dict()
        return _DEEPSEEK_V3.read_config(translated | {"model_type": "deepseek_v3"})


_DEEPSEEK_V3 = Family()
_V2 = Routing(scoring="softmax", group_score="max", renormalizes=False, reads_topk_method=True)
FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family("DeepseekV2", _V2),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "sarvam_mla": _Sarvam("SarvamMLA"),
    "glm4_moe_lite": Family("Glm4MoeLite"),
    "longcat_flash": LONGCAT,
    "kimi_linear": KIMI_LINEAR,
    "bailing_hybrid": LING,
    "mistral4": _Mistral4("Mistral4", Routing(scoring="softmax")),
    "youtu": Family("Youtu"),
    "minicpm3": MINICPM3,
    "axk1": Family("AXK1", Routing(needs_bias=False)),
    "axk2": AXK2,
    "deepseek_v32": SparseFamily("DeepseekV32"),
    "glm_moe_dsa": SparseFamily("GlmMoeDsa", rope_interleaved=True),
    "mistral_large4_text": MISTRAL_LARGE4,
    "deepseek_v4": DEEPSEEK_V4,
    "deepseek_v41_text": DEEPSEEK_V41,
    "hy_v4": HY_V4,
    "hy_v4_vl_text": HY_V4_VL,
    "dots3_note": DOTS3,
    "dots3_note_text": DOTS3,
    "glm5_next_text": GLM5_NEXT,
}


def find_family(model_type: str) -> Family:
    """Return the family of a model type.

    Raises:
        ValueError: The architecture is not in the table.
    """
    name = str(model_type)  # a file may have a value of any type
    if name in FAMILIES:
        return FAMILIES[name]
    raise ValueError(
        f"model: architecture {model_type!r} is not an MLA model this runtime knows; {choices(tuple(FAMILIES))}"
    )


def family_of(config: Any) -> Family:
    """Return the family of a transformers config (`find_family`)."""
    return find_family(config.model_type)


def attention_of(config: Any) -> Stack:
    """Return the attention of a transformers config, all its layers.

    Raises:
        ValueError: The architecture is unknown, or a field has a value that no attention can have.
    """
    return family_of(config).attention(config)
