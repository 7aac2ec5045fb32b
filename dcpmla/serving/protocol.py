"""Bodies of requests in OpenAI's API, checked.

Source: OpenAI's API reference for completions; fields beyond it carry vLLM's names.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, StringConstraints, ValidationError

from dcpmla.serving.errors import ApiError, wrong
from dcpmla.serving.refused import Fields, OpenFields, check_fields_of_body
from dcpmla.serving.sampling_fields import SamplingFields, ruled

# pydantic parses 10 million numbers a second, but only 300,000 messages, and holds Python's lock meanwhile. A thread
# would not keep the event loop free, so bodies have limits.
_MAX_NUMBERS = 1 << 21  # Constants count as well.
_MAX_ITEMS = 1 << 18  # Strings (names of fields included), lists and objects.

CacheSalt = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Body = TypeVar("Body", bound=BaseModel)
_OF_RULE = "Value error, "  # pydantic puts this before the words of a rule
_Mistake = Mapping[str, Any]  # pydantic's record


class RequestFields(OpenFields):
    """Fields of all bodies that ask for an answer."""

    model: str | None = None
    stream: bool | None = None
    cache_salt: CacheSalt | None = None

    @property
    def sampling(self) -> SamplingFields:
        """Return the fields that decide which tokens are chosen."""
        raise NotImplementedError

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of alternatives of each token, None without log probabilities."""
        return None


class StreamOptions(OpenFields):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(SamplingFields, RequestFields):
    """Fields of both kinds of completions besides the sampling fields; null is the default."""

    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None

    def model_post_init(self, context: Any, /) -> None:
        """Forget unknown fields.

        Raises:
            ApiError: A field would change the answer and is not served, is misspelt, or contradicts another.
        """
        if self.best_of not in (None, self.num_choices):
            raise wrong("best_of", f"is {self.best_of}; it must be n, {self.num_choices}")
        options = self.stream_options
        if options is not None and not self.stream and (options.include_usage or options.continuous_usage_stats):
            raise wrong("stream_options", "needs stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise wrong("prompt_logprobs", "is not supported with stream: true")
        check_fields_of_body(self)

    @property
    def sampling(self) -> SamplingFields:
        return self

    @property
    def echoes(self) -> bool:
        """Return whether each choice begins with its prompt."""
        return False


class CompletionBody(GenerationFields):
    """A body of /v1/completions.

    Attributes:
        logprobs: Number of best tokens whose log probabilities are shown; of chats, true or false. They are the model's
            own, before temperature and penalties. With `echo` the prompt has them, too, and is then computed whole, 256
            tokens a step: what lm-eval's `local-completions` asks for. Of chats all tokens have them, reasoning and
            calls included.
    """

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    echo: bool | None = None
    logprobs: Annotated[int | None, ruled("logprobs")] = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, texts or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def model_post_init(self, context: Any, /) -> None:
        """Raise ApiError as well if neither a new token nor the prompt is wanted."""
        super().model_post_init(context)
        if self.token_limit == 0 and not self.echo:
            raise wrong("max_tokens", "is 0; it must be at least 1, except with echo")


class DetokenizeBody(Fields):
    """A body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


def parse(kind: type[Body], content: bytes | bytearray) -> Body:
    """Return a body of a kind.

    Raises:
        ApiError: The body is no JSON, or one of its fields is wrong or not served; the message names the first such
            field.
    """
    _check_size(content)
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        mistake = _closest(error.errors(include_url=False, include_input=False, include_context=False))
        path, words = mistake["loc"], mistake["msg"].removeprefix(_OF_RULE)
        item = f"[{path[-1]}]" if path and isinstance(path[-1], int) else ""
        param = str(path[0]) if path else None
        message = words if mistake["msg"].startswith(_OF_RULE) else f"{param or 'the body'}{item}: {words}"
        raise ApiError(400, message, param=param) from None


def _check_size(content: bytes | bytearray) -> None:
    """Raise ApiError for JSON that would take long to parse."""
    at_most = content.count(b'"') // 2 + content.count(b"[") + content.count(b"{")
    if at_most <= _MAX_ITEMS and content.count(b",") <= _MAX_NUMBERS:
        return
    unescaped = content.replace(rb"\\", b"").replace(rb"\"", b"")
    num_strings = unescaped.count(b'"') // 2
    if num_strings <= _MAX_ITEMS:
        outside_strings = b"".join(unescaped.split(b'"')[::2])
        num_items = num_strings + outside_strings.count(b"[") + outside_strings.count(b"{")
        if num_items <= _MAX_ITEMS and outside_strings.count(b",") <= _MAX_NUMBERS:
            return
    words = f"at most {_MAX_ITEMS:,} strings, lists and objects and {_MAX_NUMBERS:,} numbers are looked at"
    raise ApiError(400, f"the body has too many values; {words}")


def _closest(errors: Sequence[_Mistake]) -> _Mistake:
    """Return the mistake in the first wrong field. A field of several kinds has an error for each, mostly about the
    kind: one about a limit, or about an item far back, is closest to the client's mistake.
    """
    own = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]

    def closeness(error: _Mistake) -> tuple[int, ...]:
        return not error["type"].endswith("_type"), *(step for step in error["loc"][2:] if isinstance(step, int))

    return max(own, key=closeness)
