"""Families that transformers has: each is in the table."""

from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dcpmla.integrations.families.family import Family
from dcpmla.integrations.families.table import FAMILIES

OTHER_NAMES = {"deepseek_v4"}  # MLA whose config does not have kv_lora_rank


def mla_types() -> set[str]:
    """Return the model types of transformers whose configs have the rank of MLA's latents."""
    classes = {model_type: CONFIG_MAPPING[model_type].__mro__ for model_type in CONFIG_MAPPING}
    return {
        model_type
        for model_type, bases in classes.items()
        if any("kv_lora_rank" in vars(base).get("__annotations__", {}) for base in bases)
        and not isinstance(getattr(CONFIG_MAPPING[model_type], "kv_lora_rank", None), AttributeError)
    }


def test_every_family_is_known() -> None:
    known = mla_types() | OTHER_NAMES
    assert {"deepseek_v3", "glm_moe_dsa"} <= known
    assert not known - FAMILIES.keys(), f"{known - FAMILIES.keys()}: add a row to FAMILIES"


def test_an_older_transformers() -> None:
    raw: dict[str, Any] = {"hidden_size": 64, "quantization_config": None}
    with pytest.raises(ValueError, match=r"transformers [\d.]+ has no FutureConfig; install a later one"):
        Family("Future").read_config(raw)
