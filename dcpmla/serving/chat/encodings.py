"""Published encodings of models that have no chat template."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Encoding(Protocol):
    """A model's way to write conversations."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        thinking: bool,
        reasoning_effort: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """Return the text of a conversation."""
        ...


def find_encoding(model_type: str) -> Encoding | None:
    """Return the encoding of a model by its config's `model_type`, None if it has none."""
    return None
