"""The base of the published encodings of models whose checkpoints have no chat template."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from dcpmla.serving.chat.markup import AnswerFormat

Message = Mapping[str, Any]
Calls = Mapping[str, tuple[int, str]]  # order and name of a message's calls, by id


@dataclass(frozen=True, kw_only=True)
class Encoding(ABC):
    """A renderer of conversations, in place of a chat template. Special tokens are part of the text.

    Attributes:
        calls: Format of answers, in which calls of the history are written.
        ends: Texts after the content of an answer without calls, and after the calls of another.
        efforts: Text for each level of effort; the key None is the default. Empty if levels are ignored.
        roles: Roles that messages may have.
        together: Roles of neighbouring messages that are written together.
        marks_systems: Whether a system's later messages are marked as such; otherwise they are a developer's.
        thinks_by_default: Whether the model reasons if a request does not say, as vLLM has it.
    """

    calls: AnswerFormat = field(repr=False)
    ends: tuple[str, str]
    efforts: Mapping[str | None, str] = field(default_factory=dict, repr=False)
    roles: Sequence[str] = ("system", "developer", "user", "assistant", "tool")
    together: Sequence[str] = ("tool",)
    marks_systems: bool = False
    thinks_by_default: bool = True

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        *,
        thinking: bool,
        reasoning_effort: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """Return a conversation as the model reads it.

        Args:
            messages: Messages of OpenAI's API; reasoning is in `reasoning_content` or `reasoning`. Contents are texts,
                None, or lists of parts with a field `text`.
            tools: Tools of OpenAI's API, which replace the first message's own.
            thinking: Whether the model reasons before it answers.
            reasoning_effort: Level of effort, None for the model's default.
            add_generation_prompt: Whether the text ends with what opens the next answer.
            continue_final_message: Whether the last message, the assistant's, goes on: its reasoning, if it has nothing
                else. Nothing is added then.
        Raises:
            ValueError: A conversation that the encoding cannot write, or an unknown level.
        """
        if self.efforts and reasoning_effort not in self.efforts:
            names = ", ".join(name for name in self.efforts if name and not name.isdigit())
            raise ValueError(f"reasoning_effort: {reasoning_effort!r} is not in {names}")
        checked = self._checked(messages)
        if continue_final_message and (not checked or checked[-1]["role"] != "assistant"):
            raise ValueError("continue_final_message: the last message must be the assistant's")
        arranged = self._arranged(checked, tools)
        first = self._first_kept(arranged)
        pieces = [self._start(arranged, tools, self.efforts.get(reasoning_effort, "") if thinking else "")]
        pieces += [self._message(arranged, number, thinking and number >= first) for number in range(len(arranged))]
        text = "".join(pieces)
        if continue_final_message:
            last = arranged[-1]
            in_reasoning = thinking and reasoning_of(last) and not text_of(last) and not last.get("tool_calls")
            end = self.calls.reasoning[1] if in_reasoning else self.ends[bool(last.get("tool_calls"))]
            return text[: text.rindex(end)]
        return text + (self._opening(arranged[-1] if arranged else None, thinking) if add_generation_prompt else "")

    def _checked(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return copies of messages with the roles that the encoder has.

        Developers' messages at the start are a system's messages: the encoders write that role as a user's. A system's
        later messages are a developer's, unless they are marked: others write them into the message before.

        Raises:
            ValueError: A message has another role.
        """
        for number, message in enumerate(messages):
            if message["role"] not in self.roles:
                roles = ", ".join(self.roles)
                raise ValueError(f"messages: role {message['role']!r} of message {number} is not in {roles}")
        later = "system" if self.marks_systems else "developer"
        others = (number for number, each in enumerate(messages) if each["role"] not in ("system", "developer"))
        first = next(others, len(messages))
        start = [{**message, "role": "system"} for message in messages[:first]]
        rest = ({**each, "role": later} if each["role"] == "system" else dict(each) for each in messages[first:])
        return [*start, *rest]

    def _arranged(self, messages: list[dict[str, Any]], tools: Sequence[Message] | None) -> list[dict[str, Any]]:
        """Return messages in the order in which they are written, with the tools if a message has them."""
        arranged, calls = list[dict[str, Any]](), dict[str, tuple[int, str]]()
        for is_together, neighbours in groupby(enumerate(messages), lambda each: each[1]["role"] in self.together):
            group = list(neighbours)
            if is_together:
                arranged += self._merged(group, arranged, calls)
                continue
            for _, message in group:
                arranged.append(message)
                called = enumerate(message.get("tool_calls") or ())
                calls = {call.get("id") or "": (order, call["function"]["name"]) for order, call in called} or calls
        return arranged

    @abstractmethod
    def _merged(
        self, group: Sequence[tuple[int, Message]], before: Sequence[Message], calls: Calls
    ) -> list[dict[str, Any]]:
        """Return the messages that neighbours with roles of `together` are written as.

        Args:
            group: The neighbours, each after its number.
            before: Messages before them, as they are written.
            calls: Calls of the last message that has some.
        Raises:
            ValueError: They do not fit the calls before them.
        """

    def _first_kept(self, messages: Sequence[Message]) -> int:
        """Return the number of the first message whose reasoning is kept."""
        return 0

    @abstractmethod
    def _start(self, messages: Sequence[Message], tools: Sequence[Message] | None, effort: str) -> str:
        """Return the text before all messages.

        Args:
            effort: Text of the level of effort, empty without reasoning.
        """

    @abstractmethod
    def _message(self, messages: Sequence[Message], number: int, reasons: bool) -> str:
        """Return the text of a message, and of what opens an answer after it if one follows.

        Args:
            reasons: Whether the message has reasoning if it is the assistant's, and the answer after it if not.
        """

    @abstractmethod
    def _opening(self, last: Message | None, thinking: bool) -> str:
        """Return the text that opens an answer after a message; None is the beginning of a conversation."""


def text_of(message: Message, separator: str = "\n\n") -> str:
    """Return the text of a message's content: a text, or texts of parts joined by a separator."""
    content = message.get("content")
    if isinstance(content, list):
        return separator.join(str(part["text"]) for part in content)
    return "" if content is None else str(content)


def reasoning_of(message: Message) -> str:
    """Return the reasoning of an assistant's message."""
    return str(message.get("reasoning_content") or message.get("reasoning") or "")
