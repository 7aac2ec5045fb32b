"""Whole answers of replies, as `collect` makes them, and the bodies that ask for them."""

from collections.abc import Iterable
from typing import Any

from dcpmla.serving.chat_answers import ChatAnswers
from dcpmla.serving.chat_body import ChatBody
from dcpmla.serving.messages import Output
from dcpmla.serving.protocol import CompletionBody, GenerationFields
from dcpmla.serving.replies import Reply
from dcpmla.serving.shown import Json


def body_of(kind: type[Any], **fields: Any) -> GenerationFields:
    """Return the body for answers of a kind, with log probabilities; completions echo the prompt."""
    if kind is not ChatAnswers:
        return CompletionBody(prompt="", echo=True, **fields)
    fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    return ChatBody.model_validate({"messages": [{"role": "user", "content": ""}], **fields})


def whole_of(reply: Reply, outputs: Iterable[tuple[int, Output]]) -> Json:
    """Return the whole answer of a reply from outputs, each with the index of its choice."""
    for index, output in outputs:
        reply.add(index, output)
    return reply.whole()
