"""Answers in OpenAI's shapes: completions and chat completions, whole and in chunks."""

import json
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from dcpmla.runtime.request import TokenLogprobs
from dcpmla.runtime.text import TokenOffsets
from dcpmla.serving.messages import Output
from dcpmla.serving.prompts import Prompt, Texts

DONE = "data: [DONE]\n\n"
_NUM_LAST = 256  # tokens of a prompt, more than the offsets of new ones depend on (`TokenOffsets`)

Json = dict[str, Any]


def event(value: Json) -> str:
    """Return an object as a server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


@dataclass
class Usage:
    """Tokens of an HTTP request: prompts once each, new tokens of all choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def count(self, output: Output) -> None:
        """Add an output."""
        self.completion_tokens += output.num_tokens

    def body(self) -> Json:
        """Return OpenAI's object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass
class Answers:
    """The choices of one HTTP request as they grow.

    Args:
        model: Name of the model for clients.
        prompts: Prompts of the choices. Each has num_choices, one after the other.
        echo: begin each choice with its prompt.
        num_logprobs: alternatives of each token, None without log probabilities.
        drops_new: the answer is the prompt alone (an echo of no new tokens).
    """

    texts: Texts
    model: str
    prompts: list[Prompt]
    num_choices: int
    echo: bool = False
    num_logprobs: int | None = None
    drops_new: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)
    _offsets: dict[int, TokenOffsets] = field(default_factory=dict)
    _lengths: dict[int, int] = field(default_factory=dict)  # characters of each choice so far

    prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def __post_init__(self) -> None:
        self.usage = Usage(sum(len(prompt.token_ids) for prompt in self.prompts))

    def drop_prompts(self) -> None:
        """Keep only the parts of prompts that answers need: they may take minutes."""
        for number, prompt in enumerate(self.prompts):
            text = prompt.text if self.echo else ""
            self.prompts[number] = replace(prompt, token_ids=prompt.token_ids[-_NUM_LAST:], text=text)

    def body(self, choices: list[Json], is_chunk: bool = False) -> Json:
        """Return the object around choices."""
        kind = self.chunk_kind if is_chunk else self.kind
        return {
            "id": self.prefix + self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def first_chunks(self) -> list[Json]:
        """Return the chunks that come before any token."""
        return []

    def chunk(self, index: int, output: Output) -> Json | None:
        """Return what an output adds to a choice, None for nothing yet."""
        output = self._counted(index, output)
        logprobs = self._logprobs(index, output)
        if not (output.text or logprobs or output.finish_reason):
            return None
        return self._choice(index, output, logprobs, is_chunk=True)

    def whole(self, index: int, output: Output) -> Json:
        """Return a choice, all its outputs in one."""
        output = self._counted(index, output)
        return self._choice(index, output, self._logprobs(index, output), is_chunk=False)

    def _counted(self, index: int, output: Output) -> Output:
        """Count an output, and return what of it is shown."""
        is_first = index not in self._begun
        self._begun.add(index)
        if is_first and index % self.num_choices == 0:
            self.usage.cached_tokens += output.num_cached_tokens
        if self.drops_new:
            output = output._replace(text="", token_ids=(), logprobs=())
        self.usage.count(output)
        if self.echo and is_first:
            output = output._replace(text=self.prompts[index // self.num_choices].text + output.text)
        return output

    def _choice(self, index: int, output: Output, logprobs: Json | None, is_chunk: bool) -> Json:
        return {"index": index, "text": output.text, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def _logprobs(self, index: int, output: Output) -> Json | None:
        """Return the log probabilities of an output's tokens, in the shape of completions."""
        if self.num_logprobs is None:
            return None
        tokens = [(self.texts.token(entry.token_id), entry) for entry in (*output.prompt_logprobs, *output.logprobs)]
        prompt = self.prompts[index // self.num_choices]
        if index not in self._offsets:
            self._offsets[index] = self.texts.offsets(prompt, len(prompt.text) if self.echo else 0)
        offsets = [*prompt.offsets] if output.prompt_logprobs else []
        offsets += [self._offsets[index].push(entry.token_id) for entry in output.logprobs]
        self._lengths[index] = length = self._lengths.get(index, 0) + len(output.text)
        if output.finish_reason:  # a stop string is not in the text, its tokens are here
            offsets = [min(offset, length) for offset in offsets]
        return {
            "tokens": [text for text, _ in tokens],
            "token_logprobs": [entry.logprob for _, entry in tokens],
            "top_logprobs": [self._alternatives(entry) for _, entry in tokens],
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float] | None:
        """Return the best tokens and the chosen one; of tokens with the same text the best one."""
        if entry.logprob is None:
            return None  # the first token of a prompt
        best: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            best.setdefault(self.texts.token(token_id), logprob)
        return best


class ChatAnswers(Answers):
    """The choices of a chat completion."""

    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first_chunks(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(self.num_choices)
        ]

    def _choice(self, index: int, output: Output, logprobs: Json | None, is_chunk: bool) -> Json:
        message = {"content": output.text} if is_chunk else {"role": "assistant", "content": output.text}
        key = "delta" if is_chunk else "message"
        return {"index": index, key: message, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def _logprobs(self, index: int, output: Output) -> Json | None:
        if self.num_logprobs is None:
            return None
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in output.logprobs
        ]
        return {"content": content}

    def _token(self, token_id: int, logprob: float | None) -> Json:
        text = self.texts.token(token_id)
        # A token that is a part of a character has no text; which bytes it is, the tokenizer does not say.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
