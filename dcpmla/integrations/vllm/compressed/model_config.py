"""vLLM's hook for the options of a model of DeepSeek-V4, before any worker starts."""

import logging
from typing import Any

from vllm.model_executor.models.config import DeepseekV4ForCausalLMConfig

from dcpmla.integrations.vllm.compressed.options import check, is_chosen

SCHEDULER = "dcpmla.integrations.vllm.compressed.scheduler.make_scheduler"

logger = logging.getLogger(__name__)


class CompressedModelConfig(DeepseekV4ForCausalLMConfig):
    """vLLM's hook for the options of such a model, called before any worker starts."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Check the options, and choose the scheduler, if they choose this package's attention."""
        DeepseekV4ForCausalLMConfig.verify_and_update_config(vllm_config)
        if is_chosen(vllm_config):
            check(vllm_config)
            _choose_scheduler(vllm_config)


def _choose_scheduler(vllm_config: Any) -> None:
    """Choose the scheduler that remembers states, or turn prefix caching off if the user chose another scheduler."""
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    if cache.enable_prefix_caching and scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = SCHEDULER
    elif cache.enable_prefix_caching:
        logger.warning(
            "dcpmla: prefix caching is off (--no-enable-prefix-caching): windows of DeepSeek-V4 belong to a request, "
            "and the scheduler of --scheduler-cls does not remember them"
        )
        cache.enable_prefix_caching = False
