"""Bodies of requests in OpenAI's API, checked, and what they ask of the engine.

Source: OpenAI's API reference for completions and chat completions; fields beyond it carry vLLM's names.
"""

import secrets
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from dcpmla.runtime.sampling import SamplingParams
from dcpmla.serving.errors import ApiError

MAX_CHOICES = 128  # Answers to one prompt.
MAX_LOGPROBS = 20  # alternatives of a token
_MAX_TOKENS = 1 << 31
_SEEDS = 1 << 64
_MAX_MESSAGES = 1 << 14
# pydantic parses 10 million numbers a second, but only 300,000 messages, and holds Python's lock meanwhile. A thread
# would not keep the event loop free, so bodies have limits.
_MAX_NUMBERS = 1 << 21  # Constants count as well.
_MAX_ITEMS = 1 << 18  # Strings (names of fields included), lists and objects.

# Fields that would change the answer and are not served, with the values that change nothing.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "web_search_options": (),
}

TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
# How far a text reaches back for a stop string is work at every token, for all requests.
StopText = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Body = TypeVar("Body", bound=BaseModel)
_Path = tuple[int | str, ...]
_Mistake = tuple[_Path, str, str]  # Path, type and message of pydantic.


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class _Generation(BaseModel):
    """Fields that both kinds of completions have; null is the default."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=0, le=_MAX_TOKENS)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_MAX_TOKENS)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, gt=-_SEEDS, lt=_SEEDS)
    stop: StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=256, fail_fast=True)] | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Return whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Forget unknown fields.

        Raises:
            ApiError: A field would change the answer and is not served, or contradicts another.
        """
        if self.best_of not in (None, self.num_choices):
            raise ApiError(400, f"best_of is {self.best_of}; it must be n, {self.num_choices}", param="best_of")
        for name, value in (self.model_extra or {}).items():
            if name in _UNSUPPORTED and value is not None and value not in _UNSUPPORTED[name]:
                raise ApiError(400, f"{name} is not supported; leave it out", param=name)
        if self.model_extra:
            self.model_extra.clear()  # The answer may take minutes.

    def params(self, max_new_tokens: int, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """Return what one prompt's requests have in common; a request without a seed gets one that nobody knows."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            seed=secrets.randbits(32) if self.seed is None else self.seed % _SEEDS,
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class CompletionBody(_Generation):
    """A body of /v1/completions."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, texts or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def check(self) -> None:
        """Raise ApiError as well where no token is asked for, and no prompt back."""
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens is 0; it must be at least 1, except with echo", param="max_tokens")


class ContentPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(strict=True)
    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(strict=True)
    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Any = None

    def for_template(self, number: int) -> dict[str, str]:
        """Return what a chat template sees.

        Raises:
            ApiError: content that is no text, or calls of tools.
        """
        if self.tool_calls:
            raise ApiError(400, "tool_calls is not supported; leave it out", param=f"messages.{number}.tool_calls")
        if isinstance(self.content, list):
            other = next((part.type for part in self.content if part.type != "text" or part.text is None), None)
            if other is not None:
                words = f"content of type {other!r} is not supported; give texts"
                raise ApiError(400, words, param=f"messages.{number}.content")
            content = "".join(part.text or "" for part in self.content)
        else:
            content = self.content or ""
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content, **named}


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)]


class ChatBody(_Generation):
    """A body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise ApiError as well for alternatives without log probabilities, and where no token is asked for."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if self.max_tokens == 0:
            raise ApiError(400, "max_tokens is 0; it must be at least 1", param="max_tokens")

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each token, or None without log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(BaseModel):
    """A body of /tokenize."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(BaseModel):
    """A body of /detokenize."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


def parse(kind: type[Body], content: bytes | bytearray, check: Callable[[Body], None] = lambda body: None) -> Body:
    """Return a body of a kind.

    Raises:
        ApiError: it is no JSON, or one of its fields is not what it must be; the message names the first such field.
    """
    _check_size(content)
    try:
        body = kind.model_validate_json(content)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
        path, words = _closest([(each["loc"], each["type"], each["msg"]) for each in errors])
        item = f"[{path[-1]}]" if path and isinstance(path[-1], int) else ""
        param = str(path[0]) if path else None
        raise ApiError(400, f"{param or 'the body'}{item}: {words}", param=param) from None
    check(body)
    return body


def _check_size(content: bytes | bytearray) -> None:
    """Raise ApiError for JSON that would take long to parse."""
    unescaped = content.replace(rb"\\", b"").replace(rb"\"", b"")
    num_strings = unescaped.count(b'"') // 2
    if num_strings <= _MAX_ITEMS:
        outside_strings = b"".join(unescaped.split(b'"')[::2])
        num_items = num_strings + outside_strings.count(b"[") + outside_strings.count(b"{")
        if num_items <= _MAX_ITEMS and outside_strings.count(b",") <= _MAX_NUMBERS:
            return
    words = f"at most {_MAX_ITEMS:,} strings, lists and objects and {_MAX_NUMBERS:,} numbers are looked at"
    raise ApiError(400, f"the body has too many values; {words}")


def _closest(errors: list[_Mistake]) -> tuple[_Path, str]:
    """Return the path and the message of the mistake in the first wrong field. A field of several kinds has an error
    for each, mostly about the kind: one about a limit, or about an item far back, is closest to the client's mistake.
    """
    own = [error for error in errors if error[0][:1] == errors[0][0][:1]]

    def closeness(error: _Mistake) -> tuple[int, ...]:
        path, kind, _ = error
        return not kind.endswith("_type"), *(step for step in path[2:] if isinstance(step, int))

    path, _, words = max(own, key=closeness)
    return path, words
