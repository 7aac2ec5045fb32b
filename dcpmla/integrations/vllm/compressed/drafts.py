"""vLLM's draft module of DeepSeek-V4 (MTP) with this package's attention layer."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.models.deepseek_v4 import DeepSeekV4MTP

from dcpmla.integrations.vllm.compressed.replace import attention_class
from dcpmla.integrations.vllm.compressed.weights import reformatted


class DCPMLADeepSeekV4MTP(DeepSeekV4MTP):
    """The draft module of this platform. Its attention is this package's if the model's is.

    Attributes:
        attention_stack: The attention layers of the model, and this module's after them; None if they are vLLM's.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        layers = vllm_config.compilation_config.static_forward_context.values()
        stack = next((layer.stack for layer in layers if hasattr(layer, "stack")), None)
        if stack is None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        else:
            with attention_class():
                super().__init__(vllm_config=vllm_config, prefix=prefix)
            stack.add_drafts([layer.mtp_block.attn for layer in self.model.layers.values()])
        self.attention_stack = stack

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint, some weights in another form (`reformatted`)."""
        if self.attention_stack is None:
            return super().load_weights(weights)
        config = self.attention_stack.config
        return super().load_weights(reformatted(weights, config.indexer.head_dim, config.rope_dim))
