"""Angles: longrope's by the published names of its fields, one list of factors for short and for long sequences; and
what all families' angles read.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.skeleton import build_skeleton
from tests.integrations.test_refused_fields import LONGROPE
from tests.support.models import FAMILIES, tiny_config


@pytest.mark.skipif("minicpm3" not in FAMILIES, reason="an older transformers")
def test_angles_of_equal_lists_depend_on_no_other_position(tmp_path: Path) -> None:
    text = json.loads(tiny_config("minicpm3").to_json_string()) | {"model_type": "minicpm3", "rope_scaling": LONGROPE}
    del text["rope_parameters"], text["v_head_dim"]  # as published
    (tmp_path / "config.json").write_text(json.dumps(text))
    config = load_config(tmp_path)
    assert attention_of(config).config.v_head_dim == 48 // 24
    rotary, x = build_skeleton(config).model.rotary_emb, torch.empty(0)
    short, long = (rotary(x, torch.tensor([positions])) for positions in ([5, 63], [5, 63, 200]))
    for angles, expected in zip(short, long, strict=True):
        assert torch.equal(angles, expected[:, :2])
        assert not torch.equal(angles[:, 0], angles[:, 1])
    assert config.rope_parameters["factor"] == 4


class _NoReading(TorchDispatchMode):
    """A mode in which no number of a tensor may be read: on a GPU the host would wait, and no step could be a graph."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "kimi_k3"])
def test_angles_read_no_number_and_change_no_frequency(family: str) -> None:
    model = build_skeleton(tiny_config(family)).model
    if not hasattr(model, "rotary_emb"):
        return
    rotary = model.rotary_emb
    buffers = {name: (id(tensor), tensor._version) for name, tensor in rotary.named_buffers()}
    of_types = [{"layer_type": name} for name in getattr(rotary, "layer_types", [])] or [{}]
    with _NoReading():
        for layer_type in of_types:
            rotary(torch.empty(0), torch.arange(200)[None], **layer_type)
    assert {name: (id(tensor), tensor._version) for name, tensor in rotary.named_buffers()} == buffers
