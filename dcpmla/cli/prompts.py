"""Prompts of `generate`, from the command line or lines of JSON, checked before any weight is read."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dcpmla.fields import is_whole
from dcpmla.runtime.prompts import check_prompt
from dcpmla.runtime.sampling import SamplingParams

if TYPE_CHECKING:
    from dcpmla.integrations.open_model import ModelFiles

# Fields of SamplingParams that have an option.
SAMPLING_OPTIONS = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids")


@dataclass(frozen=True)
class Prompt:
    """A request before the engine sees it."""

    request_id: str | int
    token_ids: list[int]
    params: SamplingParams

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the prompt that `dataclasses.asdict` made values of, also after they were JSON."""
        return cls(**{**values, "params": SamplingParams.from_dict(values["params"], SamplingParams())})


def prompts_from_options(args: argparse.Namespace, files: "ModelFiles") -> list[Prompt]:
    """Return --prompt and --prompt-ids, in the order given.

    Raises:
        ValueError: No prompt, or one that the model cannot continue.
    """
    if not args.prompts:
        raise ValueError("no prompt; give at least one --prompt, --prompt-ids or a --prompt-file")
    return [
        _prompt(index, f"prompt {index}", prompt, _defaults(args, index), "--prompt", files)
        for index, prompt in enumerate(args.prompts)
    ]


def prompts_from_file(args: argparse.Namespace, files: "ModelFiles") -> list[Prompt]:
    """Read the lines of --prompt-file: {"id", "prompt" or "prompt_token_ids", and any field of SamplingParams in place
    of the option's value}.

    Raises:
        ValueError: A file that cannot be read, or a line that is not such an object; the message names the line.
    """
    path: Path = args.prompt_file
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON may hold what str.splitlines takes for ends
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--prompt-file is {path}, which cannot be read ({error}); give a file with a JSON object on each line"
        ) from error
    prompts, line_of_id = [], dict[str | int, int]()
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        origin = f"{path}, line {index + 1}"
        try:
            prompt = _read_line(line, _defaults(args, index), files)
        except ValueError as error:
            raise ValueError(f"{origin}: {error}") from error
        if prompt.request_id in line_of_id:
            raise ValueError(
                f"{origin}: id {prompt.request_id!r} is also that of line {line_of_id[prompt.request_id]}; "
                f"ids must differ"
            )
        line_of_id[prompt.request_id] = index + 1
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"--prompt-file is {path}, which has no prompts; give a JSON object on each line")
    return prompts


def _read_line(line: str, defaults: SamplingParams, files: "ModelFiles") -> Prompt:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON object ({error}); is the line cut off?") from error
    if not isinstance(values, dict):
        raise ValueError(f"a JSON object is expected, not {type(values).__name__}")
    request_id = values.pop("id", None)
    if not (isinstance(request_id, str) or is_whole(request_id)):
        raise ValueError(f'"id" is {json.dumps(request_id)}; it must be there, a string or a whole number')
    _check_text('"id"', request_id)
    contents = [values.pop(name) for name in ("prompt", "prompt_token_ids") if name in values]
    if len(contents) != 1 or not _is_prompt(contents[0]):
        raise ValueError('give either "prompt", a string, or "prompt_token_ids", a list of whole numbers')
    return _prompt(request_id, "the prompt", contents[0], SamplingParams.from_dict(values, defaults), '"prompt"', files)


def _is_prompt(prompt: object) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(map(is_whole, prompt)))


def _prompt(
    request_id: str | int, name: str, prompt: str | list[int], params: SamplingParams, option: str, files: "ModelFiles"
) -> Prompt:
    """Tokenize and check a prompt; messages use its name, and the option that asked for a text."""
    if files.tokenizer is None and (isinstance(prompt, str) or params.stop):
        feature, instead = (
            (option, "token ids") if isinstance(prompt, str) else ("stop (--stop)", "stop_token_ids (--stop-token-ids)")
        )
        raise ValueError(
            f"{feature} needs a tokenizer, and the model's does not load: {files.no_tokenizer}; give {instead}"
        )
    for text in (prompt, *params.stop):
        _check_text(name, text)
    if isinstance(prompt, str):
        assert files.tokenizer is not None
        prompt = list(files.tokenizer(prompt)["input_ids"])
    check_prompt(name, prompt, files.config.vocab_size, files.max_model_len)
    params.check_vocabulary(files.config.vocab_size)
    return Prompt(request_id, prompt, params.at_most(files.max_model_len - len(prompt)))


def _check_text(name: str, text: object) -> None:
    """Raise ValueError for a text that no file and no tokenizer takes; anything else is checked elsewhere."""
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} has {text[error.start]!r} at position {error.start}, which is no character of Unicode"
            ) from error


def _defaults(args: argparse.Namespace, index: int) -> SamplingParams:
    """Make the params that the options ask of the prompt with an index."""
    return SamplingParams(**{name: getattr(args, name) for name in SAMPLING_OPTIONS}).for_prompt(index)
