"""Broken models: whatever a JSON file or a weight's shape says, a model loads, or a ValueError names what is wrong."""

import copy
import json
import math
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dcpmla.config import DCPConfig
from dcpmla.integrations.families.table import attention_of, find_family
from dcpmla.integrations.model_files import load_config
from dcpmla.runtime.sampling import SamplingParams
from tests.support.deepseek_v41_files import TEXT as V41
from tests.support.kimi_k3_files import TEXT
from tests.support.models import FAMILIES, save_tiny, tiny_config
from tests.support.ranks import run_ranks
from tests.support.whole_models import load_engine_on_rank

MODEL_TYPES = [family for family in FAMILIES if family not in ("deepseek_v2_no_q_lora", "deepseek_v3_neox")]
NONSENSE: list[Any] = [0, -1, 1, 2, 7, 600, 10**12, 10**400, -0.5, 2.5, math.nan, math.inf, -math.inf, True, False]
NONSENSE += [1e30, "x", "", "default", "yarn", None, [], {}, [1], ["x"], {"x": 1}, [[]], [None, 2.5], {"x": [1]}]
QUANTIZATION = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
MORE_FIELDS = {  # that a file may have, and these have not
    "index_topk_freq": 1,
    "index_skip_topk_offset": 1,
    "index_topk_pattern": "FFF",
    "indexer_rope_interleave": True,
    "rope_theta": 1e4,
    "torch_dtype": "float32",
    "quantization_config": QUANTIZATION,
}
ROPE_FIELDS = {"attention_factor": 1.0, "partial_rotary_factor": 1.0, "truncate": True, "type": "yarn"}
# Messages about weights, and a prompt, whose sizes a config contradicts.
OTHERS = (
    "the model's config asks for",
    "is missing",
    "is one too many",
    "leave room for a new one",
)


def whole_config(family: str) -> dict[str, Any]:
    """Return a tiny config as it is saved, with fields of its family that are left out there."""
    config = TEXT if family == "kimi_k3" else json.loads(tiny_config(family).to_json_string()) | {"model_type": family}
    more = MORE_FIELDS if family in ("deepseek_v32", "glm_moe_dsa") else dict(list(MORE_FIELDS.items())[4:])
    rope = {"rope_parameters": ROPE_FIELDS | config["rope_parameters"]} if "rope_parameters" in config else {}
    return more | config | rope


def paths_of(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """List the names of all fields, those of objects after the object's."""
    for name, value in config.items():
        yield (name,)
        if name in ("rope_parameters", "rope_scaling", "quantization_config", "linear_attn_config"):
            yield from ((name, field) for field in value)


def changed(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    parent = config if len(path) == 1 else config[path[0]]
    parent[path[-1]] = value
    return config


CONFIGS = {family: whole_config(family) for family in MODEL_TYPES}
CONFIGS["deepseek_v41"] = V41 | {"quantization_config": QUANTIZATION | {"expert_dtype": "fp4"}, "gate_temp": 1.0}
if hasattr(transformers, "HYV4VLTextConfig"):
    rope = CONFIGS["hy_v4"]["rope_parameters"] | {"mrope_section": [2, 1, 1]}
    vl = transformers.HYV4VLTextConfig(**CONFIGS["hy_v4"] | {"rope_parameters": rope})
    CONFIGS["hy_v4_vl_text"] = json.loads(vl.to_json_string()) | {"model_type": "hy_v4_vl_text"}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_field_is_taken_or_named(family: str, tmp_path: Path) -> None:
    """Try all values in the first family with a field, and a third in each later family."""
    number = list(CONFIGS).index(family)
    known = {path for earlier in list(CONFIGS)[:number] for path in paths_of(CONFIGS[earlier])}
    for path in paths_of(CONFIGS[family]):
        values = NONSENSE[number % 3 :: 3] if path in known else NONSENSE
        if (family, path) == ("hy_v4_vl_text", ("rope_parameters",)):
            values = [3, "x", [1]]  # of other values transformers misses their mrope_section
        for value in values:
            check_change(family, path, value, tmp_path / "config.json")


def check_change(family: str, path: tuple[str, ...], value: Any, file: Path) -> None:
    """Check that a config with one value changed loads, or that the error has the field's name."""
    file.write_text(json.dumps(changed(CONFIGS[family], path, value)))
    try:
        attention_of(load_config(file))
    except ValueError as error:
        assert is_named(path[-1], str(error)), (path, value, error)  # noqa: PT017


def is_named(field: str, message: str) -> bool:
    """Whether a message has a field's name, or transformers' words for it."""
    names = {"model_type": "architecture", "num_attention_heads": "number of attention heads"}
    return re.search(rf"\b({field}|{names.get(field, field.replace('_', ' '))})\b", message) is not None


def load_and_run(directory: Path) -> str:
    """On one rank: what a model's ValueError says; empty for one that generates."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        engine = load_engine_on_rank(directory, DCPConfig(block_size=16), seq_lens=[12])
        engine.add([1, 2, 3], SamplingParams(max_new_tokens=3))
        assert len(list(engine.run())) == 1
    except ValueError as error:
        return str(error)
    return ""


UNREAD = {
    "architectures",
    "transformers_version",
    "use_cache",
    "initializer_range",
    "attention_dropout",
    "bos_token_id",
}
DOUBTFUL = (0, 1, 2, 2.5, 1e30, None, [])  # the NONSENSE that is none for some field


def load_and_run_changed(directory: Path, config: dict[str, Any]) -> list[str]:
    """On one rank: fields whose values are neither refused by name nor let the model run."""
    assert load_and_run(directory) == ""
    wrong = []
    for path in paths_of(config):
        for value in () if path[0] in UNREAD else DOUBTFUL:
            (directory / "config.json").write_text(json.dumps(changed(config, path, value)))
            try:
                load_config(directory)
            except ValueError:
                continue  # see above
            message = load_and_run(directory)
            if message and not is_named(path[-1], message) and not any(words in message for words in OTHERS):
                wrong.append(f"{path} = {value!r}: {message}")
    return wrong


@pytest.mark.parametrize("family", ["longcat_flash", "glm_moe_dsa", "deepseek_v4"])
def test_what_a_config_check_lets_through_loads_or_is_named(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert run_ranks(1, load_and_run_changed, tmp_path, config, timeout=300) == [[]]


def load_and_run_files(directory: Path, name: str, contents: list[str]) -> list[str]:
    """Return one rank's message about each content of a file."""
    messages = []
    for content in contents:
        (directory / name).write_text(content)
        messages.append(load_and_run(directory))
    return messages


@pytest.mark.parametrize("name", ["generation_config.json", "model.safetensors.index.json"])
def test_other_files(name: str, tmp_path: Path) -> None:
    """What is no such file is refused with its name, and what is one is taken."""
    save_tiny("deepseek_v3", tmp_path)
    if name == "generation_config.json":
        good: list[Any] = [
            {"eos_token_id": 3},
            {"eos_token_id": [3, 4]},
            {"eos_token_id": None, "temperature": 0.5},
            {},
        ]
        bad: list[Any] = [3, [], "x", None, *({"eos_token_id": value} for value in (-1, 1.5, True, "x", [1, "x"], {}))]
        bad += [{"watermarking_config": 7}, {"cache_implementation": 5}]
    else:
        shard = {"lm_head.weight": "shard.safetensors"}
        (tmp_path / "model.safetensors").rename(tmp_path / "shard.safetensors")
        absent = {name: "absent.safetensors" for name in ("model.layers.3.eh_proj.weight", "vision.weight")}
        good = [{"metadata": {}, "weight_map": shard}, {"weight_map": shard}, {"weight_map": shard, "metadata": None}]
        good += [{"weight_map": shard | absent}]
        bad = [3, [], "x", None, {}]
        bad += [{"metadata": {}, "weight_map": value} for value in (None, 3, [], {}, "x")]
        bad += [
            {"metadata": {}, "weight_map": {"a": value}} for value in (None, 3, [], "", "../x", "/etc/passwd", "..")
        ]
    contents = [*map(json.dumps, [*good, *bad]), "", "{", "\x00"]
    messages = run_ranks(1, load_and_run_files, tmp_path, name, contents)[0]
    assert messages[: len(good)] == [""] * len(good)
    for content, message in zip(contents[len(good) :], messages[len(good) :], strict=True):
        assert name in message, (content, message)


def load_and_run_weights(directory: Path, changes: list[tuple[str, tuple[int, ...] | None]]) -> list[str]:
    """Return one rank's messages about a tensor of another shape, or left out."""
    tensors, messages = load_file(directory / "model.safetensors"), []
    for name, shape in changes:
        others = {other: tensor for other, tensor in tensors.items() if other != name}
        changed = others if shape is None else others | {name: torch.zeros(shape)}
        save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
        messages.append(load_and_run(directory))
    return messages


@pytest.mark.parametrize("family", ["longcat_flash", "glm_moe_dsa", "deepseek_v4"])
def test_every_weights_shape(family: str, tmp_path: Path) -> None:
    """Attention's, experts', routers', MLPs', norms', embeddings: one of each kind, larger or smaller in each dim."""
    save_tiny(family, tmp_path)
    is_v4 = family == "deepseek_v4"
    called = partial(find_family("deepseek_v4").module_name, num_layers=4) if is_v4 else str  # by the names of modules
    kinds = {re.sub(r"\d+", "N", called(name)): name for name in load_file(tmp_path / "model.safetensors")}
    parts = {kind.split(".")[-2] for kind in kinds if "." in kind}
    assert parts >= {"down_proj", "embed_tokens", "lm_head", "norm", "o_a_proj" if is_v4 else "o_proj"}
    changes: list[tuple[str, tuple[int, ...] | None]] = []
    shapes = {name: tuple(load_file(tmp_path / "model.safetensors")[name].shape) for name in kinds.values()}
    for name, shape in shapes.items():
        changes += [(name, (*shape[:dim], shape[dim] + (-1) ** dim, *shape[dim + 1 :])) for dim in range(len(shape))]
    changes += [(name, None) for name in shapes if ".experts." in name]
    changes += [("model.layers.1.mlp.experts.9.up_proj.weight", (48, 48))]
    for (name, shape), message in zip(changes, run_ranks(1, load_and_run_weights, tmp_path, changes)[0], strict=True):
        zero_expert = family == "longcat_flash" and re.search(r"experts\.[45]\.", name)
        if shape is None:
            assert message == ("" if zero_expert else f"checkpoint: tensor {called(name)} is missing")
        elif not zero_expert:
            expected = f"tensor {called(name)} has shape {shape}; the model's config asks for {shapes.get(name)}"
            is_surplus = f"tensor {name} is one too many" in message and name not in shapes
            assert expected in message or is_surplus, (name, message)


def load_uneven_experts(directory: Path) -> None:
    with pytest.raises(ValueError, match=r"experts\.0\.\w+_proj\.weight has shape \(.*\); the model's config asks for"):
        load_engine_on_rank(directory, DCPConfig(tensor_parallel_size=2), seq_lens=[12])


@pytest.mark.parametrize("size", [24, 96])
def test_experts_that_are_all_of_another_size_are_not_cut_to_fit(size: int, tmp_path: Path) -> None:
    """Over two ranks, a slice of a wider expert has the shape that a rank asks for."""
    save_tiny("deepseek_v3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = torch.randn((48, size) if "down" in name else (size, 48))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    run_ranks(2, load_uneven_experts, tmp_path)
