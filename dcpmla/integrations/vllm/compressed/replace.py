"""The replacement of the attention class of vLLM's modules for DeepSeek-V4 while they make their layers."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM

from dcpmla.integrations.vllm.compressed.attention import DCPMLADeepseekV4Attention
from dcpmla.integrations.vllm.compressed.names import CHOOSER, CPU_CLASS


@contextmanager
def attention_class() -> Iterator[None]:
    """Make the model's module construct this package's attention layers.

    Raises:
        ValueError: The module is another platform's.
    """
    module = sys.modules[DeepseekV4ForCausalLM.__module__]
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
