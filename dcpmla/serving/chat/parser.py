"""The streaming parser of answers: reasoning, content and tool calls of all formats, by their markup."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dcpmla.serving.chat.arguments import ArgumentReader, Rest, Waiting
from dcpmla.serving.chat.events import Piece, PieceCollector, Pieces
from dcpmla.serving.chat.markup import AnswerFormat, find_first, held_length

_CHUNK = 1024  # characters that are searched for markers at once: time grows with the text's length alone
_NAME = re.compile(r"[\w.:/-]{1,256}")  # names of functions if the request has no tools
_LONGEST_HEADER = 1024  # characters between a call's start and its arguments
_PARTIAL_HEADER = re.compile(r"\s*[^\s<>{}]*(?:\s[^\s<>{}]*)?\s*")  # names and numbers, not sentences
_WRAPPED_START = '{"name":"'
_WRAPPED_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")')


class _Opening(NamedTuple):
    """The beginning of a call.

    Attributes:
        call_id: Id that the model wrote, None if it wrote none.
        position: Position of the arguments in the text.
        is_wrapped: Whether the call is a JSON object, whose first field was the name.
    """

    name: str
    call_id: str | None
    position: int
    is_wrapped: bool = False


class MarkupParser:
    """A parser of one answer. Text that only looks like markup passes as it is.

    A call begins as soon as its header is complete and names a tool of the request. Content that has only white space
    before or between calls is dropped.

    Args:
        tools: Tools of the request, as OpenAI's API has them. Calls of other functions are text; without tools, all
            functions may be called.
        in_reasoning: Whether the prompt opened the reasoning, so that the answer begins inside it.
        parses_calls: Whether calls are parsed; otherwise their markup is text.
        parses_reasoning: Whether reasoning is parsed; otherwise its markup is content.
        first_call: Number of calls in the conversation before this answer, which ids of Kimi count.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        tools: Sequence[Mapping[str, Any]],
        *,
        in_reasoning: bool,
        parses_calls: bool,
        parses_reasoning: bool,
        first_call: int = 0,
    ) -> None:
        self._format, self._before_calls = answer_format.bare, answer_format.before_calls
        functions = [tool.get("function") or {} for tool in tools]
        self._schemas = {each["name"]: each.get("parameters") or {} for each in functions if "name" in each}
        self._parses_calls, self._parses_reasoning = parses_calls, parses_reasoning
        self._first_call = first_call
        self._in_reasoning = in_reasoning and parses_reasoning
        self._may_reason = parses_reasoning  # until the answer has other text
        self._in_section = False
        self._rest = Rest()
        self._space = ""  # white space that is content if other content follows
        self._has_content = False  # since the last call
        self._after_reasoning = ""
        self._num_calls = 0
        self._out = PieceCollector()
        self._steps = self._parse()

    def push(self, text: str, is_over: bool = False) -> Pieces:
        """Take the next text of the answer, which may be its last."""
        for start in range(0, len(text), _CHUNK):
            self._rest.text += text[start : start + _CHUNK]
            next(self._steps)
        if is_over:
            self._rest.is_over = True
            for _ in self._steps:
                pass
            if not self._num_calls:
                self._out.add(Piece("text", self._released()))
        return self._out.take()

    def _parse(self) -> Waiting:
        """Read the answer. At its end, what waits for more markup is text, or dropped in a call."""
        rest = self._rest
        while True:
            markers, calls = self._markers()
            next_marker = find_first(rest.text, markers)
            if next_marker is None:
                kept = held_length(rest.text, (*markers, *(self._before_calls + call for call in calls)))
                self._show(rest.cut(len(rest.text) - (0 if rest.is_over else kept)))
                if not (yield from rest.more()):
                    return
            elif next_marker[1] in calls:
                yield from self._read_call(*next_marker)
            else:
                self._read_marker(*next_marker)

    def _read_marker(self, position: int, marker: str) -> None:
        """Read text up to a marker that begins no call."""
        if marker == self._format.reasoning[0] and self._rest.text[:position].strip():
            self._show(self._rest.cut(position + len(marker)))  # reasoning comes before content
            return
        self._show(self._rest.cut(position))
        self._rest.cut(len(marker))
        if marker == self._format.reasoning[0]:
            self._in_reasoning, self._space = True, ""
        elif marker == self._format.reasoning[1]:
            self._in_reasoning = self._may_reason = False
            self._after_reasoning = self._format.after_reasoning
        elif marker == self._format.section[1]:
            self._in_section, self._space = False, ""  # White space after the last call is markup.

    def _markers(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the markers that count now, and the beginnings of calls among them."""
        markup = self._format
        calls = tuple(start for start in (markup.section[0], markup.call[0]) if start and self._parses_calls)
        start = (markup.reasoning[0],) if self._may_reason else ()
        if self._in_reasoning:
            return (*calls, *start, markup.reasoning[1]), calls
        end = (markup.section[1],) if self._in_section else ()
        return (*calls, *start, *end, *markup.dropped), calls

    def _read_call(self, position: int, marker: str) -> Waiting:
        """Read a call at a position, or a text that only begins as one."""
        rest, before = self._rest, self._before_calls
        start = position - (len(before) if rest.text.endswith(before, 0, position) else 0)
        opening = self._open(position, marker)
        if opening is False:
            self._show(rest.cut(position + len(marker)))
            return
        self._show(rest.cut(start))
        if opening is True:
            if not (yield from rest.more()):
                self._show(rest.cut(len(rest.text)))
            return
        rest.cut(opening.position - start)
        self._in_reasoning = self._may_reason = self._has_content = False
        self._in_section = bool(self._format.section[1])
        self._space = ""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        call_id = self._format.make_id(opening.name, opening.call_id, self._first_call + number)
        self._out.add(Piece("call", "", number, call_id, opening.name))
        yield from self._arguments_of(opening, number)
        if rest.is_over:
            rest.text = ""

    def _open(self, position: int, marker: str) -> _Opening | bool:
        """Return the beginning of a call at a marker, False if it is none, True if that needs more text."""
        markup, text = self._format, self._rest.text
        position += len(marker)
        if marker == markup.section[0]:
            position += len(text[position:]) - len(text[position:].lstrip())
            if not text.startswith(markup.call[0], position):
                return markup.call[0].startswith(text[position:])
            position += len(markup.call[0])
        header = text[position:]
        if markup.wraps and header.lstrip()[:1] in ("", "{"):
            return self._open_wrapped(position)
        next_marker = find_first(header, markup.stops)
        if next_marker is None:
            name = header[: len(header) - held_length(header, markup.stops)]
            return len(header) <= _LONGEST_HEADER and bool(_PARTIAL_HEADER.fullmatch(name))
        length, stop = next_marker
        match = markup.header.fullmatch(header[:length].strip())
        if match is None or not self._is_tool(match["name"]):
            return False
        end = position + length + (len(stop) if stop == markup.header_end else 0)
        return _Opening(match["name"], match.groupdict().get("id"), end)

    def _open_wrapped(self, position: int) -> _Opening | bool:
        """Return the beginning of a call that is a JSON object, as `_open` does."""
        match = _WRAPPED_NAME.match(self._rest.text, position)
        if match is not None:
            try:
                name = json.loads(match["name"])
            except ValueError:
                return False
            return self._is_tool(name) and _Opening(name, None, match.end(), is_wrapped=True)
        header = self._rest.text[position:]
        begun = "".join(header.split())[: len(_WRAPPED_START)]
        return len(header) <= _LONGEST_HEADER and _WRAPPED_START.startswith(begun)

    def _is_tool(self, name: str) -> bool:
        return name in self._schemas if self._schemas else bool(_NAME.fullmatch(name))

    def _arguments_of(self, opening: _Opening, number: int) -> Waiting:
        """Return the steps that read the arguments of a call."""
        reader = ArgumentReader(self._rest, self._format, lambda text: self._out.add(Piece("call", text, number)))
        if opening.is_wrapped:
            return reader.wrapped()
        if self._format.tags is None:
            return reader.json()
        return reader.tagged(self._format.tags, self._schemas.get(opening.name, {}))

    def _show(self, text: str) -> None:
        """Add a text to the reasoning or the content; leading white space of content waits for other content."""
        if self._in_reasoning:
            self._out.add(Piece("reasoning", text))
            self._may_reason = self._may_reason and not text.strip()
            return
        if not self._has_content:
            visible = text.lstrip()
            self._space += text[: len(text) - len(visible)]
            if not visible:
                return
            self._has_content, self._may_reason = True, False
            text = self._released() + visible
        self._out.add(Piece("text", text))

    def _released(self) -> str:
        """Return the white space that waited, without what separates reasoning from content."""
        space, self._space = self._space.removeprefix(self._after_reasoning), ""
        self._after_reasoning = ""
        return space
