"""vLLM's hook for the options of a model of DeepSeek-V4, before any worker starts."""

import logging
from typing import Any

from vllm.model_executor.models.config import DeepseekV4ForCausalLMConfig

from dcpmla.integrations.vllm.compressed.options import check, is_chosen

logger = logging.getLogger(__name__)


class CompressedModelConfig(DeepseekV4ForCausalLMConfig):
    """vLLM's hook for the options of such a model, called before any worker starts."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Check the options, and turn prefix caching off, if they choose this package's attention."""
        DeepseekV4ForCausalLMConfig.verify_and_update_config(vllm_config)
        if is_chosen(vllm_config):
            check(vllm_config)
            if vllm_config.cache_config.enable_prefix_caching:
                logger.warning(
                    "dcpmla: prefix caching is off (--no-enable-prefix-caching): windows of DeepSeek-V4 belong to a "
                    "request, so blocks alone cannot continue one"
                )
                vllm_config.cache_config.enable_prefix_caching = False
