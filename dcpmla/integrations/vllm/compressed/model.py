"""vLLM's model class for DeepSeek-V4 with this package's attention layers."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM

from dcpmla.integrations.vllm.compressed.hooks import install
from dcpmla.integrations.vllm.compressed.options import is_chosen
from dcpmla.integrations.vllm.compressed.replace import attention_class
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
        with attention_class():
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.attention_stack = CompressedStack(vllm_config, [layer.attn for layer in self.model.layers])
        install()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint. This package's layers take some weights in another form (`reformatted`)."""
        if self.attention_stack is None:
            return super().load_weights(weights)
        config = self.attention_stack.config
        return super().load_weights(reformatted(weights, config.indexer.head_dim, config.rope_dim))
