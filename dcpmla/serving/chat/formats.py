"""Formats of answers: one for each family of models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcpmla.serving.chat.events import AnswerParser


@dataclass(frozen=True)
class AnswerFormat:
    """The format of a family's answers."""

    name: str

    def parser(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        in_reasoning: bool,
        parses_calls: bool,
        parses_reasoning: bool,
        first_call: int = 0,
    ) -> AnswerParser:
        """Return a parser of one answer.

        Args:
            tools: Tools of the request, as OpenAI's API has them.
            in_reasoning: Whether the prompt opened the reasoning, so that the answer begins inside it.
            parses_calls: Whether calls are parsed; otherwise their markup is content.
            parses_reasoning: Whether reasoning is parsed; otherwise its markup is content.
            first_call: Number of calls in the conversation before this answer, which ids of Kimi count.
        """
        raise NotImplementedError


FORMATS: Mapping[str, AnswerFormat] = {}


def find_format(model_type: str, chat_template: str | None) -> AnswerFormat | None:
    """Return the format of a model by the `model_type` of its config and its template's markup, None if unknown."""
    return None
