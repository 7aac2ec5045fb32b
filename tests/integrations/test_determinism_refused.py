"""Deterministic mode refuses models by name, before any weight is read, unless their bits are compared."""

from pathlib import Path

import pytest

from dcpmla.config import DCPConfig
from dcpmla.integrations.open_model import ModelFiles, check_layout
from tests.integrations.test_determinism import FAMILIES as SUPPORTED
from tests.support import models
from tests.support.models import tiny_config
from tests.support.quantized_models import SCHEMES

INDEXED = "an indexer or a window"
REASONS = {
    "deepseek_v4": "DeepSeek-V4's attention",
    **dict.fromkeys(("kimi_linear", "kimi_k3", "bailing_hybrid", "glm5_next_text"), "linear attention"),
}


def files_of(family: str, scheme: str | None = None) -> ModelFiles:
    """Return a tiny model without weights, maybe with the config of quantized ones."""
    config = tiny_config(family)
    if scheme is not None:
        config.quantization_config = SCHEMES[scheme].config
    return ModelFiles(Path(), config, None, "", 256, {})


@pytest.mark.parametrize("family", models.FAMILIES)
def test_families(family: str) -> None:
    """A family is refused unless its bits are compared."""
    files, dcp = files_of(family), DCPConfig(deterministic=True)
    if family in SUPPORTED:
        return check_layout(files, dcp)
    reason = REASONS.get(family, INDEXED)
    with pytest.raises(ValueError, match=rf"deterministic \(--deterministic\) does not .* {reason}.*; leave it out"):
        check_layout(files, dcp)
    return check_layout(files, DCPConfig())


@pytest.mark.parametrize(
    ("scheme", "words"), [("int4", "int4"), ("mxfp4", "MXFP4"), ("e8m0_32", "MXFP8"), ("block", ""), ("tensor", "")]
)
def test_weights(scheme: str, words: str) -> None:
    files = files_of("deepseek_v3", scheme)
    if not words:
        return check_layout(files, DCPConfig(deterministic=True))
    with pytest.raises(ValueError, match=f"does not support weights in {words} .* blocks of 128 x 128"):
        check_layout(files, DCPConfig(deterministic=True))
    return check_layout(files, DCPConfig())
