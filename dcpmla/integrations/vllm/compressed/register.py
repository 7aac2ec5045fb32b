"""The registration of DeepSeek-V4, in each of vLLM's processes."""

ARCHITECTURE = "DeepseekV4ForCausalLM"
MODEL = "dcpmla.integrations.vllm.compressed.model:DCPMLADeepseekV4ForCausalLM"


def register_model() -> None:
    """Register the model class, which vLLM imports when it loads such a model, and the checks of its options.

    vLLM calls this before it reads its options. The class and the checks leave a job as it is unless its options choose
    this package's attention (`options.is_chosen`).
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from dcpmla.integrations.vllm.compressed.model_config import CompressedModelConfig

    ModelRegistry.register_model(ARCHITECTURE, MODEL)
    MODELS_CONFIG_MAP[ARCHITECTURE] = CompressedModelConfig
