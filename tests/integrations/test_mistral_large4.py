"""Mistral Large 4's shared latents, formats of caches and fields; test_transformers.py has more layouts."""

import json
from pathlib import Path
from typing import Any

import pytest

from dcpmla.integrations.families.table import find_family
from dcpmla.integrations.model_files import load_config
from tests.integrations.test_transformers import check, make_cases
from tests.support.models import LARGE4_FAMILIES, random_model, tiny_config

pytestmark = pytest.mark.skipif(not LARGE4_FAMILIES, reason="needs a transformers with Mistral Large 4")
SHARING = {
    "num_hidden_layers": 6,
    "no_rope_layers": [1, 0, 1, 0, 1, 0],
    "kv_source_layers": [0, 1, 0, 1, 4, 1],  # with and without positions, with and without an indexer
    "indexer_types": ["full", "full", "full", "shared", "shared", "full"],
    "mlp_layer_types": ["dense"] + ["sparse"] * 5,
    "layer_types": ["indexed_attention"] * 6,
}


def save(directory: Path, **changes: Any) -> Any:
    config = tiny_config("mistral_large4_text")
    model = random_model(type(config)(**config.to_dict() | changes))
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("tp", [1, 2])
def test_layers_share_latents(tp: int, tmp_path: Path) -> None:
    reference = save(tmp_path, **SHARING)
    check(reference, tmp_path, tp, make_cases(tp, [tp], (1, 2)[:tp], ("auto",)))
