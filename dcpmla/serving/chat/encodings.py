"""The published encodings of models whose checkpoints have no chat template."""

from collections.abc import Mapping

from dcpmla.serving.chat.deepseek import DEEPSEEK_V4, DEEPSEEK_V4_0731, DEEPSEEK_V32, DEEPSEEK_V41
from dcpmla.serving.chat.encoding import Encoding
from dcpmla.serving.chat.kimi_k3 import KIMI_K3

_ENCODINGS: Mapping[str, Encoding] = {
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v4": DEEPSEEK_V4,
    "deepseek_v41": DEEPSEEK_V41,
    "kimi_k3": KIMI_K3,
}


def find_encoding(model_type: str, published: str = "") -> Encoding | None:
    """Return the encoding of a model, None if it needs none, or is unknown.

    Args:
        model_type: Field `model_type` of the model's config.
        published: Text of the checkpoint's own encoder, if it has one. It shows what configs do not: V4 of 0731, which
            has other levels of effort, and Kimi-K3, whose text model is a Kimi Linear.
    """
    if "<|open|>" in published:
        return KIMI_K3
    encoding = _ENCODINGS.get(model_type.removesuffix("_text"))
    return DEEPSEEK_V4_0731 if encoding is DEEPSEEK_V4 and "Beyond maximum" in published else encoding
