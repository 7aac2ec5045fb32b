"""Messages of conversations in OpenAI's API, as chat templates take them."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from dcpmla.serving.errors import ApiError
from dcpmla.serving.refused import check_fields_of_message

_MAX_MESSAGES = 1 << 14
# Types of content's parts, with the field that has the text.
_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class ChatMessage(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: Any = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None

    def for_template(self, number: int) -> dict[str, str]:
        """Return the message as a chat template sees it.

        Raises:
            ApiError: The content is no text.
        """
        content = "" if self.content is None else "".join(_texts(self.content, f"messages.{number}.content"))
        return self.model_copy(update={"content": content}).model_dump(exclude_none=True)


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)]


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Forget unknown fields of messages.

    Raises:
        ApiError: A field would change the prompt and is not served.
    """
    for number, message in enumerate(messages):
        if message.model_extra:
            check_fields_of_message(message.model_extra, f"messages.{number}")
            message.model_extra.clear()


def _texts(content: Any, path: str) -> Iterator[str]:
    """Yield the texts of a content: a text, a part, or a list of contents."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            yield from _texts(part, path)
    else:
        kind = content.get("type") if isinstance(content, dict) else None
        text = content.get(_TEXT_FIELDS[kind]) if isinstance(kind, str) and kind in _TEXT_FIELDS else None
        if not isinstance(text, str):
            raise ApiError(400, f"content of type {kind!r} is not supported; give texts", param=path)
        yield text
