"""vLLM's model class for DeepSeek-V4 with this package's attention layers."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM

from dcpmla.integrations.vllm.compressed.attention import DCPMLADeepseekV4Attention
from dcpmla.integrations.vllm.compressed.hooks import install
from dcpmla.integrations.vllm.compressed.names import CHOOSER, CPU_CLASS
from dcpmla.integrations.vllm.compressed.options import is_chosen
from dcpmla.integrations.vllm.compressed.stack import CompressedStack
from dcpmla.integrations.vllm.compressed.weights import reformatted


class DCPMLADeepseekV4ForCausalLM(DeepseekV4ForCausalLM):
    """The model of this platform. Its attention is this package's if the options choose it, else vLLM's.

    Attributes:
        attention_stack: The attention layers; None if they are vLLM's.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        if not is_chosen(vllm_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.attention_stack = None
            return
        with _attention_class(sys.modules[DeepseekV4ForCausalLM.__module__]):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.attention_stack = CompressedStack(vllm_config, [layer.attn for layer in self.model.layers])
        install()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint. This package's layers take some weights in another form (`reformatted`)."""
        if self.attention_stack is None:
            return super().load_weights(weights)
        config = self.attention_stack.config
        return super().load_weights(reformatted(weights, config.indexer.head_dim, config.rope_dim))


@contextmanager
def _attention_class(module: Any) -> Iterator[None]:
    """Make a model module construct this package's attention layers.

    Raises:
        ValueError: The module is of another platform.
    """
    replaced = {
        CHOOSER: lambda vllm_config: DCPMLADeepseekV4Attention,
        CPU_CLASS: DCPMLADeepseekV4Attention,
    }
    name = next((name for name in replaced if hasattr(module, name)), None)
    if name is None:
        raise ValueError(
            f"dcpmla's attention for DeepSeek-V4 does not run on the platform of {module.__name__}; choose another "
            "--attention-backend"
        )
    original = getattr(module, name)
    setattr(module, name, replaced[name])
    try:
        yield
    finally:
        setattr(module, name, original)
