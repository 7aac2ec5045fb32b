"""vLLM's hook for the options of a model of DeepSeek-V4, before any worker starts."""

from typing import Any

from vllm.model_executor.models.config import DeepseekV4ForCausalLMConfig

from dcpmla.integrations.vllm.compressed.options import check, choose_scheduler, is_chosen


class CompressedModelConfig(DeepseekV4ForCausalLMConfig):
    """vLLM's hook for the options of such a model, called before any worker starts."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Check the options, and choose the scheduler, if they choose this package's attention."""
        DeepseekV4ForCausalLMConfig.verify_and_update_config(vllm_config)
        if is_chosen(vllm_config):
            check(vllm_config)
            choose_scheduler(vllm_config)
