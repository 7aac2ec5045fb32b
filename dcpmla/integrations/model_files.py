"""A model's directory and its config: found or downloaded, checked, as a transformers config of the text model."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from dcpmla.hf_quantization import has_quantized_weights
from dcpmla.integrations.config_checks import check_config, check_raw_config, reason
from dcpmla.integrations.hf_config import COMPRESSED_MODEL_TYPES, MODEL_TYPES, check_model_type

# transformers' classes for each architecture (MODEL_TYPES); Kimi-K2's checkpoints are DeepSeek-V3's under another
# name, and so are Sarvam's, whose config has names of its own, too.
_CLASS_PREFIXES = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "kimi_k2": "DeepseekV3",
    "sarvam_mla": "SarvamMLA",
    "glm4_moe_lite": "Glm4MoeLite",
    "longcat_flash": "LongcatFlash",
    "mistral4": "Mistral4",
    "youtu": "Youtu",
    "axk1": "AXK1",
    "deepseek_v32": "DeepseekV32",
    "glm_moe_dsa": "GlmMoeDsa",
    "deepseek_v4": "DeepseekV4",
}
# What a multimodal model's config may say of its text model outside text_config.
_SHARED = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # no code, no pickles


def find_model(model: str, revision: str | None = None) -> Path:
    """Return a directory as it is, or a hub id downloaded to the local cache (safetensors and JSON only).

    Args:
        revision: Branch, tag or commit of a hub id; None for its main branch.
    Raises:
        ValueError: The model is neither, or a directory with a revision.
    """
    try:
        if revision is not None and (not isinstance(revision, str) or not revision):
            raise ValueError(f"revision (--revision) is {revision!r}; it must be a branch, tag or commit")
        if Path(model).is_dir() and revision is not None:
            raise ValueError(
                f"revision (--revision) is {revision!r}, but model (--model) is the directory {model!r}; leave it out, "
                "or give a hub id"
            )
        if Path(model).is_dir():
            return Path(model)
        if Path(model).is_file():
            raise ValueError(f"model (--model) is {model!r}, a file; give the directory that it is in")
        return Path(snapshot_download(model, revision=revision, allow_patterns=_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        of_revision = "" if revision is None else f" in revision (--revision) {revision!r}"
        raise ValueError(
            f"model (--model) is {model!r}: no such directory, and no such model could be downloaded{of_revision}"
        ) from error


def find_commit(directory: Path) -> str | None:
    """Return the commit of a snapshot in the local cache of the hub; None for another directory."""
    is_snapshot = directory.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", directory.name)
    return directory.name if is_snapshot else None


def load_config(directory: Path) -> Any:
    """Return a model's transformers config, from its directory or from the config file itself; of a multimodal model
    (Kimi-K2.5) the text model's.

    Raises:
        ValueError: no config.json, an architecture that is not MLA, or a field that no such model can have.
    """
    file = directory if directory.is_file() else directory / "config.json"
    try:
        raw = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"model (--model): {directory} has no readable config.json") from error
    except ValueError as error:
        raise ValueError(f"model (--model): {file} is no JSON: {reason(error)}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"model (--model): {file} is no JSON object")
    raw = _text_fields(raw)
    model_type = raw.pop("model_type", "none")
    check_model_type(model_type)
    try:
        config_class = getattr(transformers, f"{_CLASS_PREFIXES[model_type]}Config")
        if model_type == "sarvam_mla":
            raw = config_class.from_dict(raw).to_dict() | {"model_type": "deepseek_v3"}
            config_class = transformers.DeepseekV3Config
        check_raw_config(raw)
        if not has_quantized_weights(raw.get("quantization_config") or {}):
            del raw["quantization_config"]
        config = config_class.from_dict(raw)
        check_config(config)
        if model_type in COMPRESSED_MODEL_TYPES:  # transformers drops entries after the last decoder layer's
            name = "compress_ratios" if raw.get("layer_types") is None else "layer_types"
            config.mtp_attention = {name: (raw.get(name) or [])[config.num_hidden_layers :][:1]}
    except Exception as error:  # transformers checks fields with exceptions of many kinds
        raise ValueError(f"model (--model): {file} is no {model_type} config: {reason(error)}") from error
    return config


def _text_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json that belong to its text model."""
    text = raw.get("text_config")
    if raw.get("model_type") in MODEL_TYPES or not isinstance(text, dict):
        return dict(raw)
    return {name: raw[name] for name in _SHARED if name in raw} | text
