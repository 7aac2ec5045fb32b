"""Arguments of `LLM`: the names of its options, and prompts with their parameters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from dcpmla.config import DCPConfig
from dcpmla.integrations.engine_options import ENGINE_OPTIONS
from dcpmla.ownership import TILE
from dcpmla.runtime.sampling import SamplingParams

DCP_OPTIONS = tuple(field.name for field in fields(DCPConfig) if field.name != "context_workspace_tokens")

Prompt = str | Sequence[int]


def check_names(options: Iterable[str]) -> None:
    """Raise ValueError for a name that is no option of `LLM`."""
    allowed = [*DCP_OPTIONS, "max_model_len", *ENGINE_OPTIONS, "device", "timeout"]
    for name in options:
        if name not in allowed:
            near = get_close_matches(name, allowed, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"{name} is no option of LLM; {hint}allowed are {', '.join(allowed)}")


def layout(options: Mapping[str, Any], tensor_parallel_size: int, decode_context_parallel_size: int) -> DCPConfig:
    """Return the layout of some options. By default deterministic over several ranks has the interleave that it needs.

    Args:
        options: Fields of `DCPConfig`, among others.
    Raises:
        ValueError: A value is not allowed, or sizes do not divide.
    """
    chosen: dict[str, Any] = {name: options[name] for name in DCP_OPTIONS if name in options}
    if options.get("deterministic") and decode_context_parallel_size > 1:
        chosen = {"cp_kv_cache_interleave_size": TILE, **chosen}
    sizes = {
        "tensor_parallel_size": tensor_parallel_size,
        "decode_context_parallel_size": decode_context_parallel_size,
    }
    return DCPConfig(**{**chosen, **sizes})


def pair(
    prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams]]:
    """Pair each prompt with its params."""
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and not isinstance(prompts[0], Sequence))
    each: list[Any] = [prompts] if is_one else list(prompts)
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        shared = sampling_params or SamplingParams()
        return [(prompt, shared.for_prompt(index)) for index, prompt in enumerate(each)]
    if len(sampling_params) != len(each):
        raise ValueError(
            f"sampling_params has {len(sampling_params)} elements, prompts {len(each)}; "
            f"give one, or one for each prompt"
        )
    return list(zip(each, sampling_params, strict=True))
