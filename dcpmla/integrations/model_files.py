"""A model's directory and its config: found or downloaded, checked, as a transformers config of the text model."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)

from dcpmla.integrations.config_checks import reason
from dcpmla.integrations.families.table import find_family

# What a multimodal model's config may say of its text model outside text_config.
_SHARED = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")
_MODELOPT_FILE = "hf_quant_config.json"
_ENCODERS = ("encoding_*.py", "encoding/encoding_*.py")
# No pickles, and no code that runs: encoders of chats are read as text.
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", *_ENCODERS]


def read_encoder(directory: Path) -> str:
    """Return the text of the checkpoint's own encoder of chats, which is never run; empty without one."""
    paths = sorted(path for pattern in _ENCODERS for path in directory.glob(pattern))
    return "".join(path.read_text("utf-8", "replace") for path in paths)


def read_model_type(directory: Path) -> str:
    """Return the checkpoint's `model_type`, empty without one. A text model inside may have a type of its own."""
    return str(json.loads((directory / "config.json").read_text("utf-8")).get("model_type", ""))


def find_model(model: str, revision: str | None = None) -> Path:
    """Return a directory as it is, or a hub id downloaded to the local cache (no pickles).

    Args:
        revision: Branch, tag or commit of a hub id; None for its main branch.
    Raises:
        ValueError: The model is neither, which the message explains, or a directory with a revision.
    """
    if revision is not None and (not isinstance(revision, str) or not revision):
        raise ValueError(f"revision (--revision) is {revision!r}; it must be a branch, tag or commit")
    if os.path.isdir(model):  # False, too, for a name that no file can have
        if revision is not None:
            raise ValueError(
                f"revision (--revision) is {revision!r}, but model (--model) is the directory {model!r}; leave it out, "
                "or give a hub id"
            )
        return Path(model)
    if os.path.isfile(model):
        raise ValueError(f"model (--model) is {model!r}, a file; give the directory that it is in")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_FILES))
    except Exception as error:  # of the hub's client, of its HTTP client, of the file system
        of_revision = "" if revision is None else f" in revision (--revision) {revision!r}"
        raise ValueError(
            f"model (--model) is {model!r}: no such directory, and no such model could be downloaded{of_revision}: "
            f"{_cause(error)}"
        ) from error


def _cause(error: Exception) -> str:
    """Return why a download has failed, and what helps."""
    root: BaseException = error
    while isinstance(root, LocalEntryNotFoundError) and root.__cause__ is not None:
        root = root.__cause__
    match root:
        case HFValidationError():
            return "it is no hub id (NAME, or OWNER/NAME)"
        case GatedRepoError():
            return "it is gated; accept its terms on the hub, and give a token of that account (HF_TOKEN)"
        case RevisionNotFoundError():
            return "404 from the hub, which has the model, but no such revision"
        case HfHubHTTPError():
            return f"{root.response.status_code} from the hub{_advice(root.response.status_code)}"
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set, and the local cache has no such snapshot"
        case LocalEntryNotFoundError():
            return "the local cache has no such snapshot"
    if isinstance(error, LocalEntryNotFoundError):
        return f"no connection to {constants.ENDPOINT} ({root}), and the local cache has no such snapshot"
    return reason(error)


def _advice(status: int) -> str:
    """Return what a status of the hub means, and what helps."""
    match status:
        case 401:
            return ": no such model, a private one, or a wrong token (HF_TOKEN)"
        case 403:
            return ": the token (HF_TOKEN) may not read it"
        case 404:
            return ": no such model"
        case 429:
            return ": too many requests; wait, or give a token (HF_TOKEN)"
    return "; try again later"


def find_commit(directory: Path) -> str | None:
    """Return the commit of a snapshot in the local cache of the hub; None for another directory."""
    is_snapshot = directory.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", directory.name)
    return directory.name if is_snapshot else None


def load_config(directory: Path) -> Any:
    """Return a model's transformers config, from its directory or from the config file itself; of a multimodal model
    (Kimi-K2.5) the text model's.

    Raises:
        ValueError: config.json is missing, the architecture is not MLA, or a field has an impossible value.
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
    if raw.get("quantization_config") is None and (own := file.parent / _MODELOPT_FILE).is_file():
        raw["quantization_config"] = _read_modelopt(own)
    model_type = raw.pop("model_type", "none")
    family = find_family(model_type)
    try:
        return family.read_config(raw)
    except Exception as error:  # transformers checks fields with exceptions of many kinds
        raise ValueError(f"model (--model): {file} is no {model_type} config: {reason(error)}") from error


def _read_modelopt(file: Path) -> dict[str, Any]:
    """Return the quantization_config of a file that modelopt writes, and SGLang reads, beside a config.json without.

    Raises:
        ValueError: The file is no object with an object "quantization".
    """
    try:
        fields = json.loads(file.read_text())["quantization"]
        return {"quant_method": "modelopt", **fields}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"model (--model): {file} is no JSON object with an object of quantization") from error


def _text_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json that belong to its text model."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return dict(raw)
    return {name: raw[name] for name in _SHARED if name in raw} | text
