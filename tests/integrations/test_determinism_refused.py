"""Deterministic mode refuses formats of weights by name, before any weight is read."""

from pathlib import Path

import pytest

from dcpmla.config import DCPConfig
from dcpmla.integrations.open_model import ModelFiles, check_layout
from tests.support.models import tiny_config
from tests.support.quantized_models import SCHEMES


@pytest.mark.parametrize(
    ("scheme", "words"), [("int4", "int4"), ("mxfp4", "MXFP4"), ("e8m0_32", "MXFP8"), ("block", ""), ("tensor", "")]
)
def test_weights(scheme: str, words: str) -> None:
    config = tiny_config("deepseek_v3")
    config.quantization_config = SCHEMES[scheme].config
    files = ModelFiles(Path(), config, None, "", 256, {})
    if not words:
        return check_layout(files, DCPConfig(deterministic=True))
    with pytest.raises(ValueError, match=f"does not support weights in {words} .* blocks of 128 x 128"):
        check_layout(files, DCPConfig(deterministic=True))
    return check_layout(files, DCPConfig())
