"""Longrope, by the names of MiniCPM3-4B's published config: one list of factors for short and for long sequences."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.model_files import load_config
from dcpmla.integrations.skeleton import build_skeleton
from tests.support.models import FAMILIES, tiny_config

FACTORS = [1.059, 1.124, 1.26, 1.538, 2.094, 3.145, 4.938, 7.525, 10.475, 13.062, 14.855, 15.906, 16.462, 16.74, 16.876]
FACTORS += [16.941]
LONGROPE = {"type": "longrope", "original_max_position_embeddings": 64, "short_factor": FACTORS, "long_factor": FACTORS}
PUBLISHED = {
    "architectures": ["MiniCPM3ForCausalLM"],
    "model_type": "minicpm3",
    "hidden_size": 2560,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "rms_norm_eps": 1e-5,
    "rope_scaling": LONGROPE,
    "vocab_size": 64,
    "pad_token_id": 2,
    "scale_emb": 12,
    "dim_model_base": 256,
    "scale_depth": 1.4,
}
pytestmark = pytest.mark.skipif("minicpm3" not in FAMILIES, reason="an older transformers")


def load(directory: Path, rope: dict[str, Any]) -> Any:
    (directory / "config.json").write_text(json.dumps(PUBLISHED | {"rope_scaling": LONGROPE | rope}))
    return load_config(directory)


def test_angles_of_equal_lists_depend_on_no_other_position(tmp_path: Path) -> None:
    config = load(tmp_path, {})
    assert attention_of(config).config.v_head_dim == 64
    rotary, x = build_skeleton(config).model.rotary_emb, torch.empty(0)
    short, long = (rotary(x, torch.tensor([positions])) for positions in ([5, 63], [5, 63, 100]))
    for angles, expected in zip(short, long, strict=True):
        assert torch.equal(angles, expected[:, :2])
        assert not torch.equal(angles[:, 0], angles[:, 1])

    assert load_config(tmp_path).rope_parameters["factor"] == 2


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


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"long_factor": [*FACTORS[:-1], 17.0]}, "short_factor is .* both must be the same 16 numbers"),
        ({"long_factor": FACTORS[1:], "short_factor": FACTORS[1:]}, "short_factor is .* both must be the same 16 num"),
        ({"original_max_position_embeddings": 1}, "original_max_position_embeddings is 1; it must be a whole number"),
        ({"mscale_all_dim": 1.0}, "mscale_all_dim is 1.0; it must be 0 where there is no factor"),
    ],
)
def test_other_fields_are_named(rope: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, rope)
