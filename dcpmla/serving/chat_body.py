"""Bodies of chats, checked: the base of all routes' bodies, and the bodies of chat completions.

Source: OpenAI's API reference for chat completions; fields beyond it carry vLLM's names.
"""

from typing import Annotated, Any, ClassVar

from pydantic import StringConstraints

from dcpmla.runtime.grammar import Grammar
from dcpmla.serving.conversation import ChatMessage, Conversation, Messages, thinking_of
from dcpmla.serving.errors import ApiError, wrong
from dcpmla.serving.protocol import GenerationFields, RequestFields
from dcpmla.serving.refused import OpenFields, check_fields_of_body
from dcpmla.serving.sampling_fields import ruled
from dcpmla.serving.tools import Tools, by_path, chosen, tool_use

Effort = Annotated[str, StringConstraints(min_length=1, max_length=32)]


class ChatRequest(RequestFields):
    """A body of any route that continues a conversation.

    Attributes:
        limit_name: Name of its limit of new tokens; empty for those of completions.
    """

    limit_name: ClassVar[str] = ""

    @property
    def adds_special_tokens(self) -> bool:
        """Return whether the tokenizer adds its special tokens to the template's."""
        return False

    def asked_grammar(self) -> tuple[Grammar | None, str]:
        """Return the grammar that the client asks for, None for any text, and the path of the field that has it.

        Raises:
            ApiError: A field of structured output is wrong.
        """
        return self.sampling.grammar(), self.sampling.grammar_source

    def conversation(self) -> Conversation:
        """Return the conversation, and forget its fields, because the answer may take minutes.

        Raises:
            ApiError: A field of a message or tool is wrong.
        """
        raise NotImplementedError


class ChatFields(OpenFields):
    """Fields of a conversation, and of how its prompt is written."""

    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def conversation_of(self, messages: list[ChatMessage]) -> Conversation:
        """Return the conversation that messages and fields describe; forget both, because the answer may take minutes.

        Raises:
            ApiError: The final message cannot be both continued and followed by a new one; a tool or message is wrong.
        """
        if self.add_generation_prompt and self.continue_final_message:
            raise wrong("continue_final_message", "and add_generation_prompt are both true; give one of the two")
        continues = bool(self.continue_final_message)
        tools = tool_use(by_path(self.tools), "function.parameters")
        conversation = Conversation(
            [message.for_template(number) for number, message in enumerate(messages)],
            chosen(tools, self.tool_choice, self.parallel_tool_calls),
            self.chat_template_kwargs or {},
            *thinking_of(self.reasoning_effort),
            reasoning_field="reasoning_effort",
            add_generation_prompt=not continues if self.add_generation_prompt is None else self.add_generation_prompt,
            continue_final_message=continues,
        )
        messages.clear()
        self.tools = self.chat_template_kwargs = None
        return conversation


class ChatBody(GenerationFields, ChatFields, ChatRequest):
    """A body of /v1/chat/completions.

    Attributes:
        top_logprobs: Number of best tokens whose log probabilities are shown; needs `logprobs: true`.
    """

    messages: Messages
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, ruled("logprobs")] = None

    def model_post_init(self, context: Any, /) -> None:
        """Raise ApiError as well for alternatives without log probabilities, and if no token is wanted."""
        super().model_post_init(context)
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "needs logprobs: true")
        if self.token_limit == 0:
            raise wrong("max_tokens", "is 0; it must be at least 1")

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def adds_special_tokens(self) -> bool:
        return bool(self.add_special_tokens)

    def conversation(self) -> Conversation:
        return self.conversation_of(self.messages)


class TokenizeBody(ChatFields):
    """A body of /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None

    def model_post_init(self, context: Any, /) -> None:
        """Raise ApiError if a field would change the tokens and is not served, or for no text or two."""
        check_fields_of_body(self)
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
