"""A model before its weights are read: its directory, config and tokenizer (`open_model`)."""

import logging
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from dcpmla.attention.backends.choice import check_backends
from dcpmla.config import DCPConfig
from dcpmla.hf_quantization import all_schemes, has_mxfp8
from dcpmla.integrations.families.table import attention_of
from dcpmla.integrations.model_files import find_commit, find_model, load_config
from dcpmla.integrations.tokenizer import load_tokenizer, silence_transformers
from dcpmla.text.token_bytes import Tokenizer

_logger = logging.getLogger(__name__)
_FORMATS = {"int4": "int4", "fp4": "MXFP4", "nvfp4": "NVFP4"}  # by their codes


@dataclass(frozen=True)
class ModelFiles:
    """A model before its weights are read.

    Attributes:
        tokenizer: Tokenizer, or None if it does not load, for the reason in no_tokenizer.
        max_model_len: Longest sequence to serve.
        digests: Hashes of the files that must be the same on every rank, because each rank decides when a request ends,
            for example. The commit comes first.
        commit: Commit of the snapshot, if the model comes from the hub.
    """

    directory: Path
    config: Any
    tokenizer: Tokenizer | None
    no_tokenizer: str
    max_model_len: int
    digests: dict[str, str]
    commit: str | None = None


def open_model(model: str, max_model_len: int | None = None, revision: str | None = None) -> ModelFiles:
    """Find a model, and read its config and tokenizer. transformers' progress bars and notes are off from here on.

    Args:
        model: Directory or hub id.
        max_model_len: Longest sequence; default and maximum are the model's positions.
        revision: Branch, tag or commit of a hub id; None for its main branch.
    Raises:
        ValueError: The model does not exist or is not MLA, or the length is outside [2, max_position_embeddings].
    """
    silence_transformers()
    directory = find_model(model, revision)
    config = load_config(directory)
    longest = config.max_position_embeddings
    if max_model_len is None:
        max_model_len = longest
    elif not isinstance(max_model_len, int) or not 2 <= max_model_len <= longest:
        raise ValueError(
            f"max_model_len (--max-model-len) is {max_model_len!r}; it must be in [2, {longest}], "
            f"where the model's positions end"
        )
    tokenizer, reason = load_tokenizer(directory)
    commit = find_commit(directory)
    digests = {"commit": str(commit)} | _digests(directory, tokenizer)
    return ModelFiles(directory, config, tokenizer, reason, max_model_len, digests, commit)


def warn_of_unknown_tokens(files: ModelFiles) -> None:
    """Log that the tokenizer has tokens without a row of the embedding, if it has.

    It is no error: checkpoints were published with added tokens that no text of theirs contains.
    """
    tokenizer: Any = files.tokenizer
    if tokenizer is not None and len(tokenizer) > files.config.vocab_size:
        _logger.warning(
            "the tokenizer has %s tokens, the model's vocabulary (vocab_size) %s: prompts with a later token are "
            "refused",
            f"{len(tokenizer):,}",
            f"{files.config.vocab_size:,}",
        )


def check_layout(files: ModelFiles, dcp: DCPConfig) -> None:
    """Raise ValueError, before any weight is read, if heads do not divide by the TP size, the model does not support an
    option, or a backend does not exist.
    """
    check_backends(dcp)
    attention_of(files.config).check_layout(dcp)
    if dcp.deterministic:
        _check_weights(files.config)


def _check_weights(config: Any) -> None:
    """Raise ValueError for weights that deterministic products do not take."""
    quantization = getattr(config, "quantization_config", None)
    formats = {_FORMATS[scheme.codes] for scheme in all_schemes(config) if scheme.codes in _FORMATS}
    if formats or (quantization is not None and has_mxfp8(quantization)):
        raise ValueError(
            f"deterministic (--deterministic) does not support weights in {min(formats, default='MXFP8')} "
            "(quantization_config); "
            "leave it out, or choose a checkpoint in bfloat16 or in fp8 with blocks of 128 x 128"
        )


def _digests(directory: Path, tokenizer: Any) -> dict[str, str]:
    """Hash the files of config and tokenizer, by name; add the tokenizer's class, which depends on the installation."""
    paths = [
        path
        for pattern in ("*config.json", "tokenizer.*", "*.model", "*.index.json")
        for path in sorted(directory.glob(pattern))
    ]
    return {path.name: sha256(path.read_bytes()).hexdigest()[:12] for path in paths} | {
        "tokenizer": type(tokenizer).__name__
    }
