"""The published encodings of models whose checkpoints have no chat template."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dcpmla.serving.chat.deepseek_v4 import EFFORTS_V4, EFFORTS_V4_0731, EFFORTS_V41, DeepseekV4
from dcpmla.serving.chat.deepseek_v32 import DeepseekV32
from dcpmla.serving.chat.kimi_k3 import KimiK3


class Encoding(Protocol):
    """A renderer of conversations, in place of a chat template. Special tokens are part of the text.

    Attributes:
        thinks_by_default: Whether the model reasons if a request does not say, as vLLM has it.
    """

    @property
    def thinks_by_default(self) -> bool: ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
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
            continue_final_message: Whether the last message, the assistant's, goes on; nothing is added then.
        Raises:
            ValueError: A conversation that the encoding cannot write, or an unknown level.
        """
        ...


_V4 = DeepseekV4(EFFORTS_V4)
_V4_0731 = DeepseekV4(EFFORTS_V4_0731)
_KIMI_K3 = KimiK3()
_ENCODINGS: Mapping[str, Encoding] = {
    "deepseek_v32": DeepseekV32(),
    "deepseek_v4": _V4,
    "deepseek_v41": DeepseekV4(EFFORTS_V41, section="calls", space=" ", marks_systems=True),
    "kimi_k3": _KIMI_K3,
}


def find_encoding(model_type: str, published: str = "") -> Encoding | None:
    """Return the encoding of a model, None if it needs none, or is unknown.

    Args:
        model_type: Field `model_type` of the model's config.
        published: Text of the checkpoint's own encoder, if it has one. It shows what configs do not: V4 of 0731, which
            has other levels of effort, and Kimi-K3, whose text model is a Kimi Linear.
    """
    if "<|open|>" in published:
        return _KIMI_K3
    encoding = _ENCODINGS.get(model_type.removesuffix("_text"))
    return _V4_0731 if encoding is _V4 and "Beyond maximum" in published else encoding
