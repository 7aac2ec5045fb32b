"""Control tokens in what users and tools say: their texts stay texts, so that no content can forge a turn."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from dcpmla.serving.shown import Json

CUT = "\ufdd0"  # no character: Unicode keeps it for use inside programs
_ROLES = ("user", "tool")  # Other roles are the application's and the model's own.


class ControlTokens:
    """The control tokens of a tokenizer: added ones in brackets, like <|user|>. Words like /nothink are none.

    Args:
        tokenizer: Tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        words = [word for word in added if len(word) > 2 and (word[0], word[-1]) in (("<", ">"), ("[", "]"))]
        self._pattern = re.compile(pattern_of(words)) if words else None

    def cut(self, messages: Sequence[Json]) -> list[Json]:
        """Return messages with `CUT` after the first character of each control token in contents of users and tools.

        Pieces of the rendered text between cuts are tokenized one by one.
        """
        return [self._cut(message) if message["role"] in _ROLES else message for message in messages]

    def _cut(self, message: Json) -> Json:
        content = message.get("content")
        if not isinstance(content, str):
            return message
        text = content.replace(CUT, "")
        if self._pattern is not None:
            text = self._pattern.sub(lambda found: f"{found[0][0]}{CUT}{found[0][1:]}", text)
        return {**message, "content": text}


def pattern_of(words: Sequence[str]) -> str:
    """Return a regular expression of words, of which it finds the longest: a tree of their letters, because trying all
    words one by one is slow.
    """
    groups = groupby(sorted(filter(None, words)), key=lambda word: word[0])
    branches = [re.escape(first) + pattern_of([word[1:] for word in group]) for first, group in groups]
    if len(branches) == 1 and "" not in words:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if '' in words else ''}" if branches else ""
