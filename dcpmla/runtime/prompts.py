"""Checks of prompts."""

from array import array
from collections.abc import Sequence
from operator import index

import numpy as np


def check_prompt(name: str, token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Raise ValueError, with the prompt's name, unless a model can continue it."""
    if not token_ids:
        raise ValueError(f"{name} is empty; a prompt needs at least one token")
    numbers = np.asarray(token_ids)
    outside = numbers[(numbers < 0) | (numbers >= vocab_size)]
    if outside.size:
        raise ValueError(f"{name} has token id {outside[0]}; the model's vocabulary is [0, {vocab_size})")
    if len(token_ids) >= max_model_len:
        raise ValueError(
            f"{name} has {len(token_ids)} tokens; with --max-model-len {max_model_len} at most {max_model_len - 1} "
            "leave room for a new one"
        )


def whole_numbers(prompt: Sequence[int]) -> Sequence[int]:
    """Return a prompt's token ids as ints, an array as it is; ValueError for anything else."""
    if isinstance(prompt, array):
        return prompt
    try:
        if any(isinstance(token, bool) for token in prompt):
            raise TypeError("'bool' object is no token id")
        return [index(token) for token in prompt]
    except TypeError as error:
        raise ValueError(f"prompt must be a text or token ids, whole numbers ({error})") from error
